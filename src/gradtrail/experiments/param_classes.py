"""The config class of each section of the params files, with which `gradtrail` validates it before DVC starts."""

from gradtrail.core.audit.networks import AuditConfig
from gradtrail.core.data import PreprocessConfig
from gradtrail.core.evaluate import EvaluateConfig
from gradtrail.core.export import ExportConfig
from gradtrail.core.gradients.analysis import GradientsConfig
from gradtrail.core.gradients.what_if import WhatIfConfig
from gradtrail.core.privacy_audit import PrivacyAuditConfig
from gradtrail.core.profile.benchmark import ProfileConfig
from gradtrail.core.train.config import TrainConfig
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig
from gradtrail.stages.fetch import FetchConfig
from gradtrail.stages.report.page import ReportConfig

SECTIONS: dict[str, type] = {
    "fetch": FetchConfig,
    "preprocess": PreprocessConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
    "gradients": GradientsConfig,
    "profile": ProfileConfig,
    "report": ReportConfig,
    "audit": AuditConfig,
    "privacy_audit": PrivacyAuditConfig,
    "what_if": WhatIfConfig,
    "environment": EnvironmentConfig,
    "runtime": RuntimeConfig,
}
