#!/bin/sh
# Launches every Triton kernel once at a small size under NVIDIA's compute-sanitizer.
#
#   tools/sanitize_gpu.sh [memcheck racecheck synccheck initcheck]      default: the first three
#
# Needs compute-sanitizer (of the CUDA toolkit) on the PATH, or in COMPUTE_SANITIZER; PYTHON is the interpreter. Ends
# with 0 if no tool found anything, 2 if there is no compute-sanitizer.
set -eu

cd "$(dirname "$0")/.."
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
python=${PYTHON:-python3}
export PYTHONPATH="libs:kernels:.${PYTHONPATH:+:$PYTHONPATH}"
# An allocation of its own for each tensor, so that a step past its end is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

if ! command -v "$sanitizer" > /dev/null; then
  echo "sanitize-gpu: no $sanitizer here; it comes with the CUDA toolkit, or name it in COMPUTE_SANITIZER" >&2
  exit 2
fi

[ $# -gt 0 ] || set -- memcheck racecheck synccheck
# Compiles the kernels before they are watched, and shows that they run without.
"$python" -m tests.gpu.small_launches

status=0
for tool; do
  echo "== $tool"
  # libraries try calls that may fail, to learn what the device can do: only what kernels do counts
  "$sanitizer" --tool "$tool" --report-api-errors no --error-exitcode 1 "$python" -m tests.gpu.small_launches || status=1
done
exit $status
