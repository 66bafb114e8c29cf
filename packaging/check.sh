#!/usr/bin/env bash
# Tries the packaging files with the tools that are here, and says what was not tried. Exit code 1: something failed.
#   packaging/check.sh            what takes a second
#   packaging/check.sh build      also builds the packages: the Debian one of build/release, the others where their tools are
set -uo pipefail
cd "$(dirname "$0")/.."
failures=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
ok() { echo "ok         $*"; }
failed() {
    failures=$((failures + 1))
    echo "FAILED     $*"
}
untried() { echo "not tried  $*"; }
attempt() { # WHAT COMMAND...
    local what=$1
    shift
    if "$@" >"$scratch/said" 2>&1; then ok "$what"; else failed "$what: $(tail -n 5 "$scratch/said")"; fi
}

for script in packaging/install.sh packaging/check.sh packaging/debian/build.sh; do attempt "$script: syntax" bash -n $script; done

# Spack: the recipe runs with a stand-in for Spack's directives, and each call of make names a target or a variable of the Makefile.
cat >"$scratch/recipe.py" <<'P'
import re, sys, types
said = []
package = types.ModuleType("spack.package")
class MakefilePackage:
    pass
def directive(name):
    return lambda *words, **named: said.append((name,) + words)
for name in ("license", "version", "variant", "depends_on"):
    setattr(package, name, directive(name))
package.MakefilePackage = MakefilePackage
package.run_after = lambda phase: lambda function: function
package.on_package_attributes = lambda **named: lambda function: function
package.Executable = lambda path: lambda *words: None
package.make = directive("make")
sys.modules["spack"], sys.modules["spack.package"] = types.ModuleType("spack"), package
scope = {}
exec(compile(open("packaging/spack/package.py").read(), "package.py", "exec"), scope)
class Part:
    mpicc = prefix = "/x"
class Spec(dict):
    gpu = True
    def __missing__(self, name): return Part()
    def satisfies(self, what): return self.gpu
recipe = scope["Hapt"]()
makefile = open("Makefile").read()
for Spec.gpu in (True, False):
    recipe.spec = Spec()
    recipe.build(recipe.spec, "/p"), recipe.install(recipe.spec, "/p")
makes = [word for call in said if call[0] == "make" for word in call[1:]]
assert "install" in makes and "PREFIX=/p" in makes and "CUDA=0" in makes and "CUDA_HOME=/x" in makes, makes
for word in makes:
    name = word.split("=")[0]
    assert re.search(r"^%s:|\b%s\b *[?:]?=|\$\(%s\)|\(filter [01],\$\(%s\)\)" % ((re.escape(name),) * 4), makefile, re.M), name
needs = {call[1].split("+")[0].split("@")[0] for call in said if call[0] == "depends_on"}
assert {"mpi", "hdf5", "hwloc", "jansson", "onednn", "petsc", "cuda"} <= needs, needs
P
attempt "spack/package.py with stand-ins" python3 "$scratch/recipe.py"
untried "Spack itself: spack dev-build hapt@develop builds everything that hapt needs"

# Apptainer: sections that exist, and a %post that is a shell script.
awk '/^%/ { on = $1 == "%post" } on && !/^%/' packaging/apptainer/hapt.def >"$scratch/post.sh"
attempt "apptainer/hapt.def: %post" eval 'grep -q "make install" "$scratch/post.sh" && sh -n "$scratch/post.sh"'
attempt "apptainer/hapt.def: header and sections" eval 'head -n 2 packaging/apptainer/hapt.def | grep -c "^Bootstrap: docker$\|^From: debian" | grep -qx 2 &&
    ! grep "^%" packaging/apptainer/hapt.def | grep -vxE "%(files|post|test|runscript|labels|environment|help)"'
builder=$(command -v apptainer || command -v singularity)
if [ "${1:-}" != build ]; then
    untried "apptainer build, the Debian package: packaging/check.sh build does so"
elif [ -n "$builder" ]; then
    attempt "apptainer build" "$builder" build --fakeroot "$scratch/hapt.sif" packaging/apptainer/hapt.def
else
    untried "apptainer build: there is no apptainer"
fi

# Debian: built, unpacked into a root of its own, run from there.
if [ "${1:-}" = build ] && command -v dpkg-shlibdeps >/dev/null; then
    deb=$scratch/hapt.deb
    attempt "the Debian package is built" packaging/debian/build.sh "$deb" "${HAPT_BUILD:-build/release}"
    attempt "... has a name, a version and libraries" eval 'dpkg-deb --field "$deb" Package Version Depends | grep -c "^Package: hapt$\|^Version: [0-9]\|^Depends: .*libhdf5.*openmpi" | grep -qx 3'
    attempt "... can be unpacked" dpkg -x "$deb" "$scratch/tree"
    attempt "... and runs" env -i "$scratch/tree/usr/bin/hapt" topology --cluster "$scratch/tree/usr/share/hapt/inputs/clusters/a100x4-v100x4.json"
    attempt "... holds what belongs to root alone" eval '! dpkg-deb --contents "$deb" | awk "{ print \$2 }" | grep -v "^root/root$"'
    if command -v lintian >/dev/null; then attempt "lintian finds no error" lintian --fail-on error "$deb"; else untried "lintian: it is not installed"; fi
elif [ "${1:-}" = build ]; then
    untried "the Debian package: there is no dpkg-shlibdeps (dpkg-dev)"
fi
exit $((failures > 0))
