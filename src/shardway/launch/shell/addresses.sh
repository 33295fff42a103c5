#: address NODE: its name on the network for computing, or its number there
address() {
  local name=${1%%.*}$suffix found
  [ -n "$suffix" ] || name=$1
  if [ "$resolve" = yes ]; then
    found=$(getent ahostsv4 "$name" | awk 'NR == 1 { print $1 }')
    [[ $found != 127.* ]] || found=$(own_address "$1")
    echo "$found"
  else
    echo "$name"
  fi
}

#: own_address NODE: of this node, which takes its own name for 127.0.1.1: that from which it reaches another one
own_address() {
  local node other way
  for node in "${nodes[@]}"; do
    [ "$node" != "$1" ] || continue
    other=$(getent ahostsv4 "${node%%.*}$suffix" | awk 'NR == 1 { print $1 }')
    way=$(ip -4 route get "${other:-$node}" 2> /dev/null)
    [[ $way == *" src "* ]] || continue
    way=${way##* src }
    echo "${way%% *}"
    return
  done
}

#: free_port: one of this node that follows from the job's id; the next where a program holds it, as the kernel's table says
free_port() {
  local port
  port=$((15000 + $(printf %s "$job" | cksum | cut -d' ' -f1) % 15000))
  for _ in {1..50}; do
    grep -qi "^ *[0-9]*: [0-9A-F]*:$(printf %04X "$port") " /proc/net/tcp /proc/net/tcp6 2> /dev/null || break
    port=$((15000 + (port - 14999) % 15000))
  done
  echo "$port"
}

#: meet: MASTER_ADDR is the first node as all others name it, which is this one; MASTER_PORT is free there
meet() {
  local node found
  SHARDWAY_NODES=
  for node in "${nodes[@]}"; do
    [ "${#nodes[@]}" -gt 1 ] || break
    found=$(address "$node")
    [ -n "$found" ] || say "the address of $node on the network for computing ($node$suffix) is not known"
    SHARDWAY_NODES+=${SHARDWAY_NODES:+ }${found:-$node}
  done
  [ "${#nodes[@]}" -gt 1 ] || SHARDWAY_NODES=127.0.0.1
  MASTER_ADDR=${SHARDWAY_NODES%% *}
  MASTER_PORT=$(free_port)
  export SHARDWAY_NODES MASTER_ADDR MASTER_PORT
}
