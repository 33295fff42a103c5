#: address NODE: its name on the network for computing, or its number there
address() {
  local name=${1%%.*}$suffix
  [ -n "$suffix" ] || name=$1
  if [ "$resolve" = yes ]; then
    getent ahostsv4 "$name" | awk 'NR == 1 { print $1 }'
  else
    echo "$name"
  fi
}

#: meet: MASTER_ADDR is the first node as all others name it, MASTER_PORT follows from the job's id
meet() {
  local node found
  SHARDWAY_NODES=
  for node in "${nodes[@]}"; do
    found=$(address "$node")
    [ -n "$found" ] || say "the address of $node on the network for computing ($node$suffix) is not known"
    SHARDWAY_NODES+=${SHARDWAY_NODES:+ }${found:-$node}
  done
  [ "${#nodes[@]}" -gt 1 ] || SHARDWAY_NODES=127.0.0.1
  MASTER_ADDR=${SHARDWAY_NODES%% *}
  MASTER_PORT=$((15000 + $(printf %s "$job" | cksum | cut -d' ' -f1) % 15000))
  export SHARDWAY_NODES MASTER_ADDR MASTER_PORT
}
