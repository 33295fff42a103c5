#: read_secrets FILE: exports its lines NAME=value as they stand: nothing in them is replaced or run, the last of a name
# counts, and quotes around a whole value are not a part of it; sets `secret_names`, and `secret_faults` to the numbers
# of lines that are none, or whose name is a variable that this shell keeps for itself
read_secrets() {
  local line name value there number=0 traced=""
  [[ $- != *x* ]] || { traced=yes; set +x; } # a trace would show them
  secret_names=() secret_faults=()
  [ -r "$1" ] || return 0
  while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1)) line=${line%$'\r'}
    case ${line//[[:blank:]]/} in '' | '#'*) continue ;; esac
    name=${line%%=*} value=${line#*=} there=none
    case $value in \"*\" | \'*\') value=${value:1:${#value}-2} ;; esac
    if [[ $line == *=* && $name =~ ^[[:blank:]]*(export[[:blank:]]+)?([A-Za-z_][A-Za-z0-9_]*)$ ]]; then
      name=${BASH_REMATCH[2]}
      there=$(declare -p "$name" 2> /dev/null) # what it gives to an array it would take for shell
    fi
    if [[ -z $there || $there == "declare -x "* ]]; then
      export "$name=$value"
      secret_names+=("$name")
    else
      secret_faults+=("$number")
      echo "line $number of $1 is not NAME=value with a name of its own, and was passed over" >&2
    fi
  done < "$1"
  [ -z "$traced" ] || set -x
}
