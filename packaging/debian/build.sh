#!/usr/bin/env bash
# Makes a Debian package of what `make` built here: packaging/debian/build.sh OUTPUT.deb [BUILD]
# BUILD: the folder with the program, default build/release. The package depends on the libraries of the machine that built it, by
# dpkg-shlibdeps (package dpkg-dev), so build it on the release on which it will be installed.
# MAINTAINER="Name <address>": who built it; by default the user on this machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
output=$(realpath -m "${1:?usage: packaging/debian/build.sh OUTPUT.deb [BUILD]}")
build=${2:-build/release}
for program in dpkg-deb dpkg-shlibdeps strip; do
    command -v $program >/dev/null || {
        echo "build: error: there is no $program" >&2
        echo "hint: apt-get install dpkg-dev binutils" >&2
        exit 3
    }
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
root=$scratch/debian/hapt
mkdir -p "$root"
chmod 755 "$root"
packaging/install.sh install /usr "$root" "$build" >/dev/null

# As Debian does it: dpkg knows the files, binaries are stripped, pages are compressed, the license is called copyright.
rm -rf "$root/usr/share/hapt/manifest.txt" "$root/usr/lib/hapt"
strip --remove-section=.comment "$root/usr/bin/hapt"
[ ! -d "$root/usr/share/man" ] || find "$root/usr/share/man" -type f -exec gzip -9n {} +
mv "$root/usr/share/doc/hapt/LICENSE" "$root/usr/share/doc/hapt/copyright"

printf 'Source: hapt\n\nPackage: hapt\nArchitecture: any\n' >"$scratch/debian/control"
depends=$(cd "$scratch" && dpkg-shlibdeps -O debian/hapt/usr/bin/hapt 2>"$scratch/said" | sed -n 's/^shlibs:Depends=//p')
[ -n "$depends" ] || { cat "$scratch/said" >&2; exit 3; }
values=(
    "VERSION=$(sed -n 's/^#define HAPT_VERSION "\(.*\)"$/\1/p' include/hapt/version.h)"
    "ARCHITECTURE=$(dpkg --print-architecture)"
    "MAINTAINER=${MAINTAINER:-$(id -un) <$(id -un)@localhost>}"
    "SIZE=$(du -sk "$root/usr" | cut -f 1)"
    "DEPENDS=$depends"
)
control=$(<packaging/debian/control.in)
for value in "${values[@]}"; do control=${control//@${value%%=*}@/"${value#*=}"}; done
mkdir "$root/DEBIAN"
printf '%s\n' "$control" >"$root/DEBIAN/control"
mkdir -p "$(dirname "$output")"
dpkg-deb --root-owner-group --build "$root" "$output" >/dev/null
echo "$output"
