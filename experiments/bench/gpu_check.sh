#!/usr/bin/env bash
# On a GPU, in under ten minutes: the kernels' correctness tests, then their times, in one JSON file.
# Installs nothing. Needs jax with CUDA, numpy and pytest; optax and flax for the training step; triton and jax-triton for
# the Triton kernels (0.3, which wants absl-py, with triton 3.6, else 0.4; its wheel on PYTHONPATH is enough). What lacks
# something is skipped.
# usage: [OUT=FOLDER] [SAMPLES=30] [SMALL=1] experiments/bench/gpu_check.sh [LIMIT_SECONDS]
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-experiments/bench/results}
limit=${1:-570}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda} XLA_PYTHON_CLIENT_PREALLOCATE=false

say() { printf '\n== %s (%ss)\n' "$1" "$SECONDS"; }

say "the device"
"$python" -c 'import jax; print(jax.__version__, jax.devices()[0].device_kind)' || exit 1
"$python" -m pallas_kernels

say "correctness"
timeout $((limit * 2 / 5)) "$python" -m pytest -q -p no:cacheprovider --junitxml "$out/tests.xml" \
  tests/pallas_kernels/test_residual_norm.py tests/pallas_kernels/test_bias_gelu.py \
  tests/pallas_kernels/test_cross_entropy.py tests/pallas_kernels/test_gates.py \
  tests/pallas_kernels/test_triton_kernels.py -k "not interpreted"
tests=$?

say "times"
steps="train_step_unrolled train_step"
"$python" -c 'import flax, optax, orbax.checkpoint' 2>/dev/null || { steps="" && echo "no training step: flax, optax or orbax is missing"; }
# What matters most comes first: what was measured before the time ran out is kept.
timeout $((limit - SECONDS)) "$python" experiments/bench/kernels.py --out "$out/kernels.json" ${SMALL:+--small} \
  --samples "${SAMPLES:-30}" norm_backward stream_norm_backward gelu_backward cross_entropy ${steps%% *} \
  norm_forward add_norm_forward gelu_forward rms_norm_forward rms_norm_backward ${steps##* } \
  swiglu_forward swiglu_backward geglu_forward geglu_backward
times=$?

say "a mixture of experts"
sizes="--samples ${SAMPLES:-30} --rows 8 --context 1024 --width 768 --expert_size 768"
left=$((limit - SECONDS))
[ -z "${SMALL:-}" ] || sizes="--samples 3"
# shellcheck disable=SC2086
timeout $((left > 1 ? left : 1)) "$python" experiments/bench/moe.py $sizes --json "$out/moe.json" || echo "no times of experts"

say "one file"
"$python" - "$out" "$tests" "$times" <<'PYTHON'
import json, sys
from pathlib import Path
from xml.etree import ElementTree

out, tests, times = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
result = {"exit_codes": {"tests": tests, "times": times}, "tests": None, "times": None, "experts": None}
if (out / "moe.json").exists():
    result["experts"] = json.loads((out / "moe.json").read_text())
if (out / "tests.xml").exists():
    suite = ElementTree.parse(out / "tests.xml").getroot().find("testsuite")
    failed = [c.get("classname") + "::" + c.get("name") for c in suite if c.find("failure") is not None or c.find("error") is not None]
    counts = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    result["tests"] = {**counts, "seconds": float(suite.get("time")), "failed": failed}
if (out / "kernels.json").exists():
    result["times"] = json.loads((out / "kernels.json").read_text())
(out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
print(out / "gpu_check.json", result["tests"])
PYTHON
exit $((tests || times))
