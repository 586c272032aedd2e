#!/usr/bin/env bash
# Builds the C++ targets with clang's libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer: fuzz/build.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "$1")
clang=$(command -v clang++ || compgen -c clang++- | grep -E '^clang\+\+-[0-9]+$' | sort -V | tail -n 1) ||
  { echo "clang is needed (Debian: apt-get install clang)" >&2; exit 1; }
flags=(-std=c++17 -O1 -g1 -I. -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined)
mkdir -p "$out/objects"
sources=(xla_ffi/{common,proxy,exchange,transport,transport/tcp,transport/shm,transport/rdma,device,device/stream,device/driver}/*.cc)
for source in "${sources[@]}"; do
  case "$source" in *_test.cc) continue ;; esac
  object=$out/objects/$(tr / _ <<<"$source").o
  echo "$source" "$object"
done | xargs -r -P "$(nproc)" -n 2 bash -c \
  '"$0" "${@:1:$#-2}" -fsanitize=fuzzer-no-link -c "${@: -2:1}" -o "${@: -1}"' "$clang" "${flags[@]}"
for source in xla_ffi/fuzz/*.cc; do
  name=$(basename "$source" .cc)
  [[ "$name" == replay ]] || "$clang" "${flags[@]}" -fsanitize=fuzzer "$source" "$out"/objects/*.o -o "$out/$name" -pthread -ldl
done
