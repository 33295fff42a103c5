#: drop_variables PATTERN...: those that mean something for another job or rank; the first pattern that fits decides, "!..." keeps
drop_variables() {
  local name pattern
  for name in $(compgen -e); do
    for pattern in "$@"; do
      # shellcheck disable=SC2254 # it is a pattern
      case $name in
        ${pattern#!})
          [[ $pattern == !* ]] || unset "$name"
          break
          ;;
      esac
    done
  done
}
