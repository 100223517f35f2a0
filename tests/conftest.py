import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent / "experiments"))

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Compiled once for a session: its workers and the processes that tests start read what another has compiled.
    compiled = tempfile.TemporaryDirectory(prefix="andrea_jax_compiled_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
