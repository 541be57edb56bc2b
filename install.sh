#!/usr/bin/env bash
# Install the toolkit. You can run it again at any time. In order, it:
#   1. picks the Python: the activated environment, or a new .venv (also if the system's Python is externally managed)
#   2. keeps an installed torch; otherwise installs one, the CPU build if there is no NVIDIA driver
#   3. installs the package (editable), and with --dev what the tests need
#   4. as root, installs what DeepSpeed needs to compile (g++, libaio-dev); says what a missing tool disables
#
#   bash install.sh             to use the toolkit
#   bash install.sh --dev       also pytest, ruff, mypy
#   bash install.sh --no-venv   into the current Python, whatever it is (containers, NGC images)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

extras="" venv=auto
for flag in "$@"; do
  case "$flag" in
    --dev) extras="[dev]" ;;
    --no-venv) venv=no ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "install.sh: unknown flag $flag. Use --dev or --no-venv." >&2; exit 2 ;;
  esac
done
say() { printf 'install.sh: %s\n' "$*"; }

# 1. The Python
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { say "there is no $python. Install Python 3.10 to 3.13, or set PYTHON." >&2; exit 2; }
facts() { "$python" -c "$1" 2>/dev/null; }
facts 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || {
  say "this is $("$python" --version 2>&1), but Python 3.10 to 3.13 is needed. Set PYTHON to one." >&2
  exit 2
}
activated=$(facts 'import sys; print(int(sys.prefix != sys.base_prefix))')
has_torch=$(facts 'import importlib.util as u; print(int(u.find_spec("torch") is not None))')
managed=$(facts 'import os, sysconfig; print(int(os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))))')
# An image with a torch and pinned packages (NGC: PIP_CONSTRAINT) gets no .venv, which would hide that torch.
pinned_image=0
[ -n "${PIP_CONSTRAINT:-}" ] && [ "$has_torch" = 1 ] && [ "$managed" = 0 ] && pinned_image=1
activate=""
if [ "$venv" = auto ] && [ "$activated" = 0 ] && [ "${CONDA_PREFIX:-}" = "" ] && [ "$pinned_image" = 0 ]; then
  # --system-site-packages makes the system's torch visible, so it is kept.
  site=(); [ "$has_torch" = 1 ] && site=(--system-site-packages)
  if [ ! -x .venv/bin/python ]; then
    "$python" -m venv "${site[@]}" .venv || { say "python3-venv is missing: apt-get install python3-venv" >&2; exit 1; }
    say "created .venv"
  fi
  python=$PWD/.venv/bin/python activate=". .venv/bin/activate && "
fi
if [ "$venv" = no ] && [ "$activated" = 0 ] && [ "$managed" = 1 ] && [ -z "${PIP_BREAK_SYSTEM_PACKAGES:-}" ]; then
  say "--no-venv, but this Python is externally managed (PEP 668), so pip refuses to install into it. Leave out --no-venv,
    or set PIP_BREAK_SYSTEM_PACKAGES=1 if you may change this machine's system packages." >&2
  exit 2
fi
say "using $("$python" --version) in $("$python" -c 'import sys; print(sys.prefix)')"

# 2. torch: never replaced
torch_version() { "$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true; }
before=$(torch_version)
keep=$(mktemp) && trap 'rm -f "$keep"' EXIT
if [ -n "$before" ]; then
  say "keeping torch $before"
else
  wanted="torch>=2.6,<2.14" # as in pyproject.toml
  if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null && [ ! -e /proc/driver/nvidia/version ]; then
    # From wherever pip is configured to look (an extra index, a folder of wheels).
    "$python" -m pip install -q "torch==2.13.0+cpu" 2>/dev/null && say "no NVIDIA driver: installed the CPU build of torch" ||
      say "no NVIDIA driver, but pip finds no CPU build of torch. Installing the default build, with gigabytes of unused
    CUDA libraries. To avoid that, press Ctrl-C, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, and run this again."
  fi
  "$python" -m pip install -q "$wanted"
fi
# Nothing below may replace it: pip takes several constraint files, and the image's own still applies.
printf 'torch==%s\n' "$(torch_version)" >"$keep"
# Pin the releases with which the tests last passed; an image has its own pins.
if [ -n "$extras" ] && [ "$pinned_image" = 0 ]; then grep -v '^torch==' constraints.txt >>"$keep"; fi

# 3. The package. pip before 23.1 runs an old setup.py (seqeval's) directly. Then setuptools fetches its build requirements,
# but not their dependencies (fonttools/py-zopfli#31 explains why). With --use-pep517 pip fetches all of them.
"$python" -m pip install -q --use-pep517 -c "$keep" -e ".$extras"
after=$(torch_version)
if [ -n "$before" ] && [ "$before" != "$after" ]; then
  say "torch was $before and is now $after. This is a bug in this script; please report it." >&2
  exit 1
fi

# 4. What DeepSpeed needs to compile
lost() { say "$1 is missing: $2"; }
need=()
command -v g++ >/dev/null || need+=(g++)
[ -e /usr/include/libaio.h ] || need+=(libaio-dev)
if [ ${#need[@]} -gt 0 ] && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${need[@]}"; } >/dev/null 2>&1 || true
fi
command -v g++ >/dev/null || lost g++ "no optimizer offload (zero2_offload, zero3_offload, zero3_nvme). Install g++."
[ -e /usr/include/libaio.h ] || lost libaio-dev "no NVMe offload (zero3_nvme). Install libaio-dev."
"$python" -m ninja --version >/dev/null 2>&1 || command -v ninja >/dev/null || lost ninja "no optimizer offload. pip install ninja."

say "torch $after, deepspeed $("$python" -c 'from importlib.metadata import version; print(version("deepspeed"))')"
say "done. Next:"
printf '\n    %sdeepspeed --num_gpus 2 recipes/seq_cls.py\n\n' "$activate"
