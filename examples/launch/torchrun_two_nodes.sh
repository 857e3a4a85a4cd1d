#!/bin/bash
# Trains on two machines that see this folder. Run it on both, in the script's folder; the first one is the head:
#   bash ../launch/torchrun_two_nodes.sh 0 HEAD train.py    on the machine HEAD
#   bash ../launch/torchrun_two_nodes.sh 1 HEAD train.py    on the other one
# PROCESSES: per machine, one per GPU (8). PORT: a free one of the head (29500).
set -eu
if [ $# -lt 3 ]; then
    echo "usage: $0 NODE HEAD PROGRAM ...; NODE is 0 or 1, HEAD the name or address of machine 0" >&2
    exit 2
fi
node=$1 head=$2
shift 2
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
exec torchrun --nnodes 2 --node-rank "$node" --nproc-per-node "${PROCESSES:-8}" \
    --master-addr "$head" --master-port "${PORT:-29500}" "$@"
