#!/bin/sh
# Starts glm53srv, in a container and without one.
#
#   entrypoint.sh [OPTION...]           serve; options here win over GLM53_ARGS, and those over variables
#   entrypoint.sh COMMAND [OPTION...]   any other command: doctor, download, generate, pack ...
#
# GLM53_ROOT   where scripts/install.sh put everything (default: the folder above this file's)
# GLM53_ARGS   more options of serve, split at blanks: for a compose file or a unit. A value with blanks in it
#              has its own variable: GLM53_MODE, GLM53_MODEL_DIR, PORT, SERVED_NAME ... (glm53srv --help)
#
# The server replaces this shell, so a SIGTERM reaches it and its exit code is that of the container. It needs
# no init in front of it: as process 1 it asks for SIGTERM before it does anything long, and it starts no
# processes that it would have to reap.
set -eu

root=${GLM53_ROOT:-$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)}
program=$root/.venv/bin/glm53srv
if [ ! -x "$program" ]; then
    echo "entrypoint.sh: no $program: run scripts/install.sh, or set GLM53_ROOT to where it installed" >&2
    exit 2
fi

case ${1-} in
"" | -*)
    set -f # a * in an option is a star
    # shellcheck disable=SC2086 # one word per option is the point
    set -- serve ${GLM53_ARGS-} "$@"
    ;;
esac
exec "$program" "$@"
