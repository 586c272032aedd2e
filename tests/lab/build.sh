#!/usr/bin/env bash
# Builds the kernel in user mode in which tests run whose needs this machine's kernel does not meet: software RoCE with
# on-demand paging, TLS with keys that can be replaced, tc netem.
#
#   tests/lab/build.sh SOURCE OUT     SOURCE: Linux 6.15 or newer, a folder or a tar archive; OUT: the kernel, a file
#
# Some minutes. Needs apt-get install gcc make patch flex bison bc xz-utils.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source=$(realpath "$1") out=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [[ -d "$source" ]]; then cp -r "$source/." "$work"; else tar -C "$work" --strip-components=1 -xf "$source"; fi
cd "$work"
# The time of a tick is the least that a sleep takes; the default has 10 ms.
sed -i '/^config HZ/,/default 100/s/default 100/default 1000/' arch/um/Kconfig
# An error that is corrected in newer sources is none here.
patch -sfNp1 <"$here/rxe-odp.patch" || echo "rxe-odp.patch does not apply: is it corrected there?" >&2
KCONFIG_ALLCONFIG=$here/kernel.config make -s ARCH=um allnoconfig
make -s ARCH=um -j"$(nproc)" linux
strip -o "$out" linux
