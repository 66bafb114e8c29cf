"""Spack's recipe. Copy it to packages/hapt/package.py of a package repository (spack repo create), add that (spack repo add), and build a
clone of hapt in its own folder:

    spack dev-build hapt@develop

To install from a clone elsewhere, add its address to the class as `git = "..."`."""

from spack.package import *

try:
    from spack_repo.builtin.build_systems.makefile import MakefilePackage  # Spack 1.0 and newer
except ImportError:
    pass  # earlier versions have it in spack.package


class Hapt(MakefilePackage):
    """Plans and trains neural networks on heterogeneous clusters: exact search of pipeline plans, SPMD programs, H-1F1B training."""

    license("Apache-2.0")

    version("develop", branch="main")

    variant("petsc", default=False, description="Solve linear programs with PETSc/TAO")
    variant("cuda", default=False, description="Build the back end of NVIDIA GPUs")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("gmake", type="build")
    depends_on("pkgconfig", type="build")
    depends_on("mpi")
    depends_on("hdf5+mpi")
    depends_on("hwloc")
    depends_on("jansson")
    depends_on("onednn")
    depends_on("petsc+mpi~complex", when="+petsc")
    depends_on("cuda@12:", when="+cuda")

    def flags(self):
        spec = self.spec
        return [
            "CC=%s" % spec["mpi"].mpicc,
            "PETSC=" + ("1" if spec.satisfies("+petsc") else "0"),
            "CUDA_HOME=%s" % spec["cuda"].prefix if spec.satisfies("+cuda") else "CUDA=0",
        ]

    def build(self, spec, prefix):
        make(*self.flags())

    def install(self, spec, prefix):
        make("install", "PREFIX=%s" % prefix, *self.flags())

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def check_version(self):
        Executable(self.prefix.bin.hapt)("--version")
