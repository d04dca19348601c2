#!/bin/bash
# build.sh KERNELS ROOT: makes KERNELS/vmlinuz, and in ROOT what the guest starts with: busybox,
# modules and `init`. The kernel is Debian's, unpacked in KERNELS once and never installed.
# Needs apt-get, dpkg, kmod and busybox-static.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$2
mkdir -p "$1" && cd "$1"
export PATH="$PATH:/usr/sbin:/sbin"

if [ ! -s kernel-version ]; then
  package=$(apt-cache depends linux-image-amd64 | awk '/Depends:/ { print $2; exit }')
  rm -rf kernel
  apt-get download -q "$package"
  dpkg -x "$package"_*.deb kernel
  rm -f -- *.deb
  depmod -b kernel "${package#linux-image-}"
  cp "kernel/boot/vmlinuz-${package#linux-image-}" vmlinuz
  echo "${package#linux-image-}" >kernel-version
fi
version=$(cat kernel-version)

mkdir -p "$root"/{bin,lib/modules,proc,sys,dev}
cp "$(command -v busybox)" "$root/bin/busybox"
ln -s busybox "$root/bin/sh"
# ext4 asks for its checksum by name, which no list of dependencies knows.
for module in virtio_pci 9pnet_virtio 9p crc32c_generic virtio_blk ext4; do
  modprobe -d kernel -S "$version" --show-depends "$module"
done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r module; do
  cp "$module" "$root/lib/modules/"
  echo "${module##*/}" >>"$root/modules"
done
install -m 755 "$here/init" "$root/init"
