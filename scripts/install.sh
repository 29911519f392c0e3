#!/usr/bin/env bash
# Install glm53srv for this machine, without a container and without root.
#
#   scripts/install.sh              for the NVIDIA GPU of this machine (CUDA 13 toolkit needed)
#   scripts/install.sh --cpu        without a GPU, to serve the demo model of this repository
#   scripts/install.sh --check      only look whether everything needed is here
#
#   --root DIR, GLM53_ROOT   where it goes: /opt/glm53srv for root, else ~/.local/share/glm53srv
#   PYTHON                   the interpreter, 3.11 to 3.13 (python3)
#   TORCH_CUDA_ARCH_LIST     GPUs to build for, such as 8.6 (default: those of this machine)
#   MAX_JOBS                 compilers at a time (default: what cores and memory allow)
#
# Run again after an update: what is there already is kept, and only what changed is built.
set -euo pipefail

source_dir=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
kind=cuda
only_check=no
root=${GLM53_ROOT:-}
problems=0

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

problem() {
    echo "missing: $1" >&2
    problems=$((problems + 1))
}

has() {
    command -v "$1" >/dev/null 2>&1
}

parse() {
    while (($#)); do
        case $1 in
        --cpu) kind=cpu ;;
        --check) only_check=yes ;;
        --root=*) root=${1#*=} ;;
        --root)
            (($# > 1)) || die "--root needs a directory"
            root=$2
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) die "unknown option $1; there are --cpu, --check, --root DIR, --help" ;;
        esac
        shift
    done
    if [[ -z $root ]]; then
        if ((EUID == 0)); then root=/opt/glm53srv; else root=$HOME/.local/share/glm53srv; fi
    fi
}

die() {
    echo "install.sh: $1" >&2
    exit 2
}

check_python() {
    if ! has "$python"; then
        problem "$python; install it (Debian, Ubuntu: apt-get install python3 python3-venv), or name one: PYTHON=python3.12"
        return
    fi
    if ! "$python" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
        problem "Python 3.11 to 3.13, $python is $("$python" -c 'import platform; print(platform.python_version())'); name another: PYTHON=python3.12"
    fi
}

check_compilers() {
    has "${CC:-gcc}" || problem "a C compiler for the CPU kernels; apt-get install gcc"
    [[ $kind == cuda ]] || return 0
    has "${CXX:-g++}" || problem "a C++ compiler for exllamav3; apt-get install g++"
    local header
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null || true)/Python.h
    [[ -f $header ]] || problem "Python.h ($header) for exllamav3 and Triton; apt-get install python3-dev"
}

# torch 2.11 is built for CUDA 13: its extensions need that toolkit, and a driver that knows it.
check_cuda() {
    local nvcc version driver capability
    nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
    if ! has "$nvcc"; then
        problem "nvcc of the CUDA 13 toolkit; install cuda-toolkit-13-0, then put /usr/local/cuda/bin on PATH or set CUDA_HOME"
    else
        version=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p' || true)
        [[ $version == 13 ]] || problem "nvcc 13, $nvcc is ${version:-of no known version}; install cuda-toolkit-13-0 and set CUDA_HOME=/usr/local/cuda-13.0"
    fi
    if ! has nvidia-smi; then
        if [[ -n ${TORCH_CUDA_ARCH_LIST:-} ]]; then return; fi
        problem "nvidia-smi, so no NVIDIA driver; install driver 580 or newer, or use --cpu (to build for another machine set TORCH_CUDA_ARCH_LIST)"
        return
    fi
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
    if [[ ! $driver =~ ^[0-9]+ ]]; then
        problem "an answer from the NVIDIA driver; nvidia-smi fails: reboot after a driver update, or reinstall it"
        return
    fi
    ((${driver%%.*} >= 580)) || problem "NVIDIA driver 580 or newer for CUDA 13, this one is $driver; update it"
    while read -r capability; do
        [[ $capability =~ ^([89]|1[0-9])\. ]] || problem "a GPU of compute capability 8.0 or newer (RTX 30, A100 ...), one here has $capability; use --cpu"
    done < <(nvidia-smi --query-gpu=compute_cap --format=csv,noheader)
}

# cpu: 0.2 GB, measured. cuda: an estimate; 2.8 GB of wheels, more than twice that unpacked, and nvcc's objects.
check_space() {
    local needed_gb=1 parent=$root free_gb
    [[ $kind == cpu ]] || needed_gb=12
    while [[ ! -d $parent ]]; do parent=$(dirname -- "$parent"); done
    [[ -w $parent ]] || problem "leave to write to $parent; choose another place with --root DIR"
    free_gb=$(df -Pk -- "$parent" | awk 'NR == 2 { printf "%d", $4 / 1000000 }')
    ((free_gb >= needed_gb)) || problem "$needed_gb GB of disk under $parent, $free_gb are free; choose another place with --root DIR"
}

copy_program() {
    mkdir -p -- "$root"
    root=$(cd -- "$root" && pwd)
    [[ $root != "$source_dir" ]] || return 0
    local name
    for name in cffi_build docker native reference/demo/checkpoint requirements scripts LICENSE; do
        rm -rf -- "${root:?}/$name"
        mkdir -p -- "$(dirname -- "$root/$name")"
        cp -R -- "$source_dir/$name" "$root/$name"
    done
    # The kernels that were built for this machine stay, so that they are not built again.
    mkdir -p -- "$root/glm53srv"
    find "$root/glm53srv" -name '*.py' -delete
    (cd -- "$source_dir" && find glm53srv -name '*.py' -print0 | tar --null -cf - -T -) | tar -xf - -C "$root"
}

install_program() {
    local flags=()
    [[ $kind == cpu ]] || flags=(--cuda)
    "$python" "$root/scripts/bootstrap.py" "${flags[@]}"
    [[ $kind == cpu ]] || "$root/.venv/bin/python" "$root/scripts/build_exllamav3.py"
}

say_what_next() {
    local model=$root/reference/demo/checkpoint
    [[ $kind == cpu ]] || model=$root/models
    echo
    echo "Installed in $root. To serve:"
    echo "  $root/docker/entrypoint.sh --model $model"
    [[ $kind == cpu ]] || echo "The model, 125 GB, once before that:  $root/docker/entrypoint.sh download --model $model"
    echo "What this machine can run:  $root/docker/entrypoint.sh doctor --model $model"
    echo "As a service:  deploy/glm53srv.service"
}

main() {
    parse "$@"
    check_python
    check_compilers
    [[ $kind == cpu ]] || check_cuda
    check_space
    if ((problems)); then
        echo "install.sh: $problems of the things above are to be mended; nothing was changed" >&2
        exit 1
    fi
    echo "all that --$kind needs is here; installing into $root"
    [[ $only_check == no ]] || exit 0
    copy_program
    install_program
    say_what_next
}

main "$@"
