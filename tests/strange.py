"""An environment that is none of ours, and must not change a byte of what a stage writes."""

MATPLOTLIBRC = "font.size: 20\naxes.facecolor: red\nlines.linewidth: 9\nsavefig.dpi: 50\nimage.cmap: jet\n"
VARIABLES = {
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_ENABLE_X64": "1",
    "JAX_NUM_CPU_DEVICES": "2",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "LC_ALL": "C",
    "MPLBACKEND": "svg",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "Prescott",
    "OPENBLAS_NUM_THREADS": "1",
}
UMASK = ("sh", "-c", 'umask 077; exec "$@"', "sh")
