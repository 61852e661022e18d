#!/bin/bash
# The same on every node: NODES=2 PROCESSES=8 MASTER=host-of-node-0:29500 bash torchrun.sh
# torchrun creates the processes and Shardwise joins them; if one fails, torchrun starts all again and they resume.
exec torchrun --nnodes "$NODES" --nproc-per-node "$PROCESSES" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$MASTER" --rdzv-id "${RUN_ID:-shardwise}" \
    -m shardwise train "${JOB:-job.toml}" --continue --set run.folder="${FOLDER:-runs/torchrun}"
