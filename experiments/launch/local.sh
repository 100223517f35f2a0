#!/bin/bash
# Several processes on this machine, one GPU each where there are GPUs:
#   experiments/launch/local.sh 4 --gin_file=andrea_12m --gin.data.path=my.txt
# Ctrl-C and SIGTERM reach all of them. The exit code is the highest of theirs.
set -u
processes=${1:?usage: local.sh PROCESSES [flags of train.py]}
shift
train="$(dirname "$0")/../train.py"
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')

pids=()
for ((i = 0; i < processes; i++)); do
  if [ -e "/dev/nvidia$i" ] && [ -z "${CUDA_VISIBLE_DEVICES:-}" ]; then devices=$i; else devices=${CUDA_VISIBLE_DEVICES:-}; fi
  CUDA_VISIBLE_DEVICES=$devices python "$train" "$@" \
    --gin.distributed.coordinator="127.0.0.1:$port" \
    --gin.distributed.processes="$processes" \
    --gin.distributed.process="$i" &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' INT TERM

highest=0
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done # a trapped signal ends a wait early
  wait "$pid"
  code=$?
  if ((code > highest)); then highest=$code; fi
done
exit "$highest"
