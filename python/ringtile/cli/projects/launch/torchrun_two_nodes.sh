#!/bin/bash
# Trains on two machines that see this folder. Run it on both, the first one of which is the head:
#   bash launch/torchrun_two_nodes.sh 0 HEAD    on the machine HEAD
#   bash launch/torchrun_two_nodes.sh 1 HEAD    on the other one
# PROCESSES: per machine, one per GPU (8). PORT: a free one of the head (29500).
set -eu
if [ $# -ne 2 ]; then
    echo "usage: $0 NODE HEAD; NODE is 0 or 1, HEAD the name or address of machine 0" >&2
    exit 2
fi
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
exec torchrun --nnodes 2 --node-rank "$1" --nproc-per-node "${PROCESSES:-8}" \
    --master-addr "$2" --master-port "${PORT:-29500}" @program@
