"""Asks git, where there is git."""

import subprocess


def git(*arguments: str) -> str:
    """Return what a git command prints, stripped; empty where it fails or git is not installed."""
    try:
        result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
