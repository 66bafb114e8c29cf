# make run     installs what is missing (Debian/Ubuntu), builds, and runs the main job on CPU ranks
# make         builds what runs    make tests        the tests, benches and the CUDA toolkit for cores, too    make install PREFIX=/usr/local
# make check   every test            make check-quick  3 minutes of them    make check-long   the long campaigns too
# make bench   speed side by side with a peer, and the plan against an even split
# make help    all targets and variables
.DEFAULT_GOAL := all
SHELL := /bin/bash
MAKEFLAGS += --no-builtin-rules
# One compilation more than there are cores, at most 16; make -jN decides otherwise. Several goals may depend on their order: one at a time.
ifeq ($(MAKELEVEL)$(word 2,$(MAKECMDGOALS)),0)
MAKEFLAGS += -j$(shell jobs=$$(($$(nproc 2>/dev/null || echo 1) + 1)); echo $$((jobs < 16 ? jobs : 16)))
endif

VARIANT ?= release
BUILD := build/$(VARIANT)
CC := mpicc
CXX := c++
CLANG_FORMAT ?= clang-format
Q := $(if $(filter 1,$(V)),,@)
comma := ,
hash := \#

hdf5 := $(firstword $(foreach p,hdf5-openmpi hdf5,$(shell pkg-config --exists $(p) 2>/dev/null && echo $(p))))
PACKAGES := $(hdf5) hwloc jansson
PACKAGE_CFLAGS := $(shell pkg-config --cflags $(PACKAGES) 2>/dev/null)
PACKAGE_LIBS := $(shell pkg-config --libs $(PACKAGES) 2>/dev/null)

# PETSc solves linear programs; it is optional. It is loaded when the first one is solved, so only its name is built in.
petsc := $(if $(filter 0,$(PETSC)),,$(firstword $(foreach p,petsc PETSc,$(shell pkg-config --exists $(p) 2>/dev/null && echo $(p)))))
PETSC_FOLDER := $(if $(petsc),$(patsubst -L%,%,$(firstword $(shell pkg-config --libs-only-L $(petsc)) $(shell pkg-config --variable=libdir $(petsc)))))
PETSC_LIBRARY := $(if $(petsc),$(shell objdump -p $(PETSC_FOLDER)/$(patsubst -l%,lib%.so,$(firstword $(shell pkg-config --libs-only-l $(petsc)))) 2>/dev/null | awk '/SONAME/ {print $$2}'))
PETSC_CFLAGS := $(if $(PETSC_LIBRARY),$(filter -I%,$(shell pkg-config --cflags $(petsc))))
PETSC_NAMES := -DHAPT_PETSC_FOLDER='"$(PETSC_FOLDER)"' -DHAPT_PETSC_LIBRARY='"$(PETSC_LIBRARY)"'
# Open MPI's mpicc adds its folders only if it sees a file, which "-" is not.
petsc_usable = $(shell printf '$(hash)include <petsctao.h>\n$(hash)if !defined(PETSC_USE_REAL_DOUBLE) || defined(PETSC_USE_COMPLEX)\n$(hash)error\n$(hash)endif\n' | $(CC) $(PETSC_CFLAGS) -E -xc /dev/stdin >/dev/null 2>&1 && echo yes)
with_tao := $(if $(PETSC_LIBRARY),$(petsc_usable))

WARNINGS := -Wall -Wextra -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes $(if $(filter 1,$(WERROR)),-Werror)
OPTIMIZE := -O2
# Line numbers are all that crash reports and profilers need, and a build takes a sixth less. CFLAGS=-g: variables for a debugger, too.
CFLAGS ?= $(if $(sanitizer),-g,-g1)
override CFLAGS += -std=c11 -D_GNU_SOURCE $(WARNINGS) -Iinclude $(PACKAGE_CFLAGS) -fopenmp
KERNEL_FLAGS := -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast
LIBS := $(PACKAGE_LIBS) -ldnnl -lm -lpthread -ldl
# Variants with a sanitizer. asan and lsan report leaks; tests/sanitizers holds what is suppressed, and why.
sanitizer := $(patsubst asan,address$(comma)undefined -fno-sanitize-recover=undefined,$(patsubst tsan,thread,$(patsubst lsan,leak,$(filter asan tsan lsan,$(VARIANT)))))
ifneq ($(sanitizer),)
OPTIMIZE := -O1 -fno-omit-frame-pointer -fsanitize=$(sanitizer)
endif

# Hardening: calls that would overflow a buffer end the process (FORTIFY; its level 3 where the compiler and the C library have it, and only with
# optimisation), so do overwritten stacks; addresses are random, and tables of addresses are read-only after the start. HARDEN=0 leaves it out.
# Sanitizers replace the calls that FORTIFY checks and look at the stack themselves.
hardened := $(if $(filter 0,$(HARDEN))$(sanitizer),,yes)
fortify_level = $(shell echo '$(hash)include <stdio.h>' | $(CC) -O2 -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3 -Werror -xc -c -o /dev/null - 2>/dev/null && echo 3 || echo 2)
fortify := $(if $(hardened),$(if $(filter -O1 -O2 -O3 -Os -Og -Ofast,$(OPTIMIZE)),-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$(fortify_level)))
HARDENING := $(if $(hardened),$(fortify) -fstack-protector-strong -fPIE)
LINK_HARDENING := $(if $(hardened),-Wl$(comma)-z$(comma)relro$(comma)-z$(comma)now)
override CFLAGS += $(HARDENING)
EXECUTABLE = $(if $(hardened),-pie $(LINK_HARDENING)) $(LDFLAGS)
# gold links the many tests in a third of the time.
gold = $(if $(sanitizer)$(findstring -fuse-ld,$(CFLAGS) $(LDFLAGS)),,$(has_gold))
has_gold := $(shell command -v ld.gold >/dev/null && echo 'int main(void) { return 0; }' | $(CC) $(LDFLAGS) -fuse-ld=gold -xc -o /dev/null - 2>/dev/null && echo -fuse-ld=gold)

# Kernels are compiled once per instruction-set level and chosen at run time.
ISAS := $(if $(filter x86_64,$(shell uname -m)),v2 v3 v4,base)
isa_flags = -DHAPT_ISA=$(1) $(if $(filter base,$(1)),,-march=x86-64-$(1))

absent := src/solve/$(if $(with_tao),tao_absent.c,tao.c) $(if $(with_tao),,src/solve/petsc.c)
# The program alone is made of these; tests and benches are linked without them.
program_sources := src/main.c src/commit.c
program_objects := $(program_sources:%.c=$(BUILD)/%.o)
sources := $(filter-out $(program_sources) $(absent),$(shell find src -name '*.c' | sort))
isa_sources := $(filter src/device/cpu/isa_%.c,$(sources))
plain_sources := $(filter-out $(isa_sources),$(sources))
objects := $(plain_sources:%.c=$(BUILD)/%.o) $(foreach i,$(ISAS),$(isa_sources:%.c=$(BUILD)/%.$(i).o))
tests := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/unit/*.c tests/mpi/*.c tests/gpu/*.c)) $(BUILD)/tests/fuzz/fuzz
gpu_programs := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/unit/kernels_*.c tests/gpu/*.c))
benches := $(patsubst %.c,$(BUILD)/%,$(wildcard bench/*.c))

faults := $(patsubst %.c,$(BUILD)/%.so,$(wildcard tests/faults/*.c))

# The CUDA back end: a plug-in that is built where a toolkit is (CUDA_HOME, the compiler on the PATH, or the usual folder) and CUDA=0 does not
# forbid it. For the first architectures of its kind that the toolkit knows; newer devices compile the last one's code when it is loaded.
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc)))
NVCC := $(if $(filter 0,$(CUDA)),,$(wildcard $(CUDA_HOME)/bin/nvcc))
CUDA_ARCHS ?= $(if $(NVCC),$(filter 60 70 75 80 90,$(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch))))
cuda_code = $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_$(lastword $(CUDA_ARCHS)),code=compute_$(lastword $(CUDA_ARCHS))
# CUDA_QUICK=1: hardly anything is optimised, which takes a quarter of the time to compile; for checks without a GPU.
NVCC_FLAGS = $(if $(filter 1,$(CUDA_QUICK)),-O1 -Xcicc -O0 -Xptxas -O0,-O3) -std=c++17 -Iinclude -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra $(if $(hardened),-Xcompiler -fstack-protector-strong $(addprefix -Xcompiler ,$(fortify))) $(if $(filter 1,$(WERROR)),-Xcompiler -Werror -Werror all-warnings) $(cuda_code)
# Collectives among devices: where NCCL's header is, 2.14 or newer; NCCL=0 leaves them out. The library itself is looked for when they are used.
nccl_header := $(if $(filter 0,$(NCCL)),,$(wildcard $(CUDA_HOME)/include/nccl.h /usr/include/nccl.h))
# Convolutions and attention: where cuDNN's header is, 9 or newer (its graph API has one of its own); CUDNN=0 leaves it out, and hapt's own kernels run.
cudnn_header := $(if $(filter 0,$(CUDNN)),,$(wildcard $(CUDA_HOME)/include/cudnn_graph.h $(foreach p,include include/$(shell uname -m)-linux-gnu local/include,/usr/$(p)/cudnn_graph.h)))
cuda_sources := $(filter-out $(if $(nccl_header),,%/nccl.cu) $(if $(cudnn_header),,%/cudnn.cu %/cudnn_attention.cu %/cudnn_convolution.cu),$(sort $(wildcard src/device/cuda/*.cu)))
cuda_plugin := $(if $(NVCC),$(BUILD)/hapt-cuda.so)
# The plans of the real cuDNN, which need no GPU, and a driver for them.
cuda_plans := $(if $(NVCC),$(if $(cudnn_header),$(BUILD)/tests/gpu/plans $(if $(wildcard $(CUDA_HOME)/lib64/stubs/libcuda.so),$(BUILD)/tests/gpu/driver/libcuda.so.1)))
# The same sources on this machine's cores (tests/gpu/host).
cuda_host := $(BUILD)/tests/gpu/hapt-cuda-host.so $(BUILD)/tests/gpu/selftest

all: build/hapt $(cuda_plugin)

benches: $(benches)

# tests/run needs these and `all`.
tests: $(tests) $(benches) $(faults) $(cuda_plans) $(cuda_host)

# An earlier plug-in would still be found beside the executable.
ifeq ($(CUDA),0)
$(BUILD)/hapt: | without_cuda
without_cuda: FORCE
	$(Q)rm -f $(BUILD)/hapt-cuda.so
endif

build/hapt: $(BUILD)/hapt
	$(Q)ln -sf $(VARIANT)/hapt $@

$(BUILD)/hapt: $(program_objects) $(BUILD)/libhapt.a
	@echo "LD   $@"
	$(Q)$(CC) $(CFLAGS) $(OPTIMIZE) $(EXECUTABLE) -o $@ $^ $(LIBS)

$(BUILD)/libhapt.a: $(objects) $(BUILD)/solvers
	@echo "AR   $@"
	$(Q)rm -f $@ && ar rcs $@ $(objects)

# Another choice of solvers makes another library.
$(BUILD)/solvers: FORCE
	$(Q)mkdir -p $(@D)
	$(Q)echo '$(if $(with_tao),tao )' | cmp -s - $@ || echo '$(if $(with_tao),tao )' >$@

# The commit for `hapt --version`. A new commit, or a first change after one, compiles src/commit.c alone and links the program. HAPT_COMMIT=HASH
# names the commit of sources without their .git, such as a package's.
git_commit = $(shell [ -e .git ] && GIT_OPTIONAL_LOCKS=0 git -c safe.directory='$(CURDIR)' describe --always --dirty --abbrev=8 --exclude='*' 2>/dev/null)
$(BUILD)/commit: FORCE
	$(Q)mkdir -p $(@D)
	$(Q)commit='$(or $(HAPT_COMMIT),$(git_commit))'; echo "$$commit" | cmp -s - $@ || echo "$$commit" >$@

$(BUILD)/src/commit.o: $(BUILD)/commit
$(BUILD)/src/commit.o: override CFLAGS += -DHAPT_COMMIT='"$(shell cat $(BUILD)/commit 2>/dev/null)"'

define isa_rule
$(BUILD)/%.$(1).o: %.c
	@echo "CC   $$< ($(1))"
	$$(Q)mkdir -p $$(@D)
	$$(Q)$$(CC) $$(CFLAGS) $$(OPTIMIZE) $$(KERNEL_FLAGS) $(call isa_flags,$(1)) -MMD -MP -c -o $$@ $$<
endef
$(foreach i,$(ISAS),$(eval $(call isa_rule,$(i))))

$(BUILD)/src/device/%.o: src/device/%.c
	@echo "CC   $<"
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(OPTIMIZE) $(KERNEL_FLAGS) -MMD -MP -c -o $@ $<

$(BUILD)/src/solve/tao.o $(BUILD)/src/solve/petsc.o: override CFLAGS += $(PETSC_CFLAGS) $(PETSC_NAMES)

$(BUILD)/%.o: %.c
	@echo "CC   $<"
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(OPTIMIZE) -MMD -MP -c -o $@ $<

$(BUILD)/tests/%: tests/%.c $(BUILD)/libhapt.a
	@echo "LD   $@"
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(OPTIMIZE) -Itests -MMD -MP -MF $@.d $(EXECUTABLE) $(gold) -o $@ $< $(BUILD)/libhapt.a $(LIBS)

# GLPK is these tests' oracle, where it is installed (tests/lp_oracle.h).
glpk = $(shell echo '$(hash)include <glpk.h>' | $(CC) $(CFLAGS) -E -xc - >/dev/null 2>&1 && echo -lglpk)
$(BUILD)/tests/unit/solve $(BUILD)/tests/unit/milp $(BUILD)/tests/unit/ratios: override LIBS += $(glpk)

$(BUILD)/tests/fuzz/fuzz: $(patsubst %.c,$(BUILD)/%.o,$(wildcard tests/fuzz/*.c)) $(BUILD)/libhapt.a
	@echo "LD   $@"
	$(Q)$(CC) $(CFLAGS) $(OPTIMIZE) $(EXECUTABLE) -o $@ $^ $(LIBS)

$(BUILD)/hapt-cuda.so: $(cuda_sources:%.cu=$(BUILD)/%.cu.o)
	@echo "LD   $@"
	$(Q)$(NVCC) -shared -cudart static $(if $(hardened),-Xlinker -z$(comma)relro$(comma)-z$(comma)now) -o $@ $^ -lcublasLt -ldl -Xlinker -rpath,$(CUDA_HOME)/lib64

$(BUILD)/src/device/cuda/%.cu.o: src/device/cuda/%.cu
	@echo "NVCC $<"
	$(Q)mkdir -p $(@D)
	$(Q)$(NVCC) $(NVCC_FLAGS) -MMD -MP -c -o $@ $<

$(BUILD)/tests/gpu/plans: cuda_code = -gencode arch=compute_$(lastword $(CUDA_ARCHS)),code=sm_$(lastword $(CUDA_ARCHS))
$(BUILD)/tests/gpu/plans: tests/gpu/plans.cu
	@echo "NVCC $<"
	$(Q)mkdir -p $(@D)
	$(Q)$(NVCC) $(NVCC_FLAGS) -MMD -MP -MF $@.d -o $@ $< -ldl -Xlinker -rpath,$(CUDA_HOME)/lib64

$(BUILD)/tests/gpu/driver/libcuda.so.1: tests/gpu/driver.awk
	@echo "AWK  $<"
	$(Q)mkdir -p $(@D)
	$(Q)nm -D --defined-only $(CUDA_HOME)/lib64/stubs/libcuda.so | awk -f $< >$(@D)/driver.c
	$(Q)$(CC) -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o $@ $(@D)/driver.c

# Host CUDA has no attention by cuDNN.
host_cuda_kernels := $(filter-out %/cudnn_attention.cu,$(sort $(wildcard src/device/cuda/*.cu)))
host_cuda_sources := $(sort $(filter-out tests/gpu/host/selftest.cpp,$(wildcard tests/gpu/host/*.cpp)))
$(BUILD)/tests/gpu/hapt-cuda-host.so: $(host_cuda_kernels:%.cu=$(BUILD)/tests/gpu/%.o) $(host_cuda_sources:%.cpp=$(BUILD)/%.o)
	@echo "LD   $@"
	$(Q)$(CXX) -shared $(LINK_HARDENING) -o $@ $^ -lpthread -lrt

# The host CUDA's own test.
$(BUILD)/tests/gpu/selftest: $(patsubst %.cpp,$(BUILD)/%.o,$(sort $(wildcard tests/gpu/host/*.cpp tests/gpu/host/checks/*.cpp)))
	@echo "LD   $@"
	$(Q)$(CXX) -o $@ $^ -lpthread -lrt

HOST_CUDA_FLAGS = -g1 -O1 -std=c++17 -fPIC -fvisibility=hidden -DHAPT_HOST_CUDA $(if $(hardened),$(fortify) -fstack-protector-strong) -Itests/gpu/host -Iinclude -Wall -Wextra $(if $(filter 1,$(WERROR)),-Werror)
$(BUILD)/tests/gpu/%.o: %.cu
	@echo "CXX  $< (host)"
	$(Q)mkdir -p $(@D)
	$(Q)$(CXX) -x c++ $(HOST_CUDA_FLAGS) -MMD -MP -c -o $@ $<

$(BUILD)/tests/gpu/host/%.o: tests/gpu/host/%.cpp
	@echo "CXX  $<"
	$(Q)mkdir -p $(@D)
	$(Q)$(CXX) $(HOST_CUDA_FLAGS) -MMD -MP -c -o $@ $<

# Preloaded by tests: calls that fail.
$(BUILD)/tests/faults/%.so: tests/faults/%.c
	@echo "LD   $@"
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -g -O2 -std=c11 -D_GNU_SOURCE $(WARNINGS) $(if $(hardened),$(fortify) -fstack-protector-strong $(LINK_HARDENING)) -shared -fPIC -o $@ $< -ldl

$(BUILD)/bench/%: bench/%.c $(BUILD)/libhapt.a
	@echo "LD   $@"
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(OPTIMIZE) -MMD -MP -MF $@.d $(EXECUTABLE) $(gold) -o $@ $< $(BUILD)/libhapt.a $(LIBS)

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# Installs the packages that a fresh Debian or Ubuntu lacks. Where pkg-config finds everything, nothing is installed. Without root the command is printed, and run by
# SUDO=sudo alone.
deps:
	$(Q)SUDO='$(SUDO)' jobs/setup-debian.sh $(DEPS)

run: deps
	$(Q)$(MAKE) --no-print-directory all inputs
	$(Q)jobs/run-local.sh

inputs: build/hapt
	$(Q)jobs/make-inputs.sh

check: deps
	$(Q)$(MAKE) --no-print-directory all tests
	$(Q)tests/run $(BUILD) '$(TESTS)'

check-quick: deps
	$(Q)$(MAKE) --no-print-directory all tests
	$(Q)HAPT_QUICK=1 tests/run $(BUILD) '$(TESTS)'

# Are plans, programs, losses and weights what commit BASE makes of the same files, bit for bit? For changes of structure.
check-hold: $(BUILD)/hapt
	$(Q)tests/hold/run $(or $(BASE),$(error say BASE=COMMIT))

check-long:
	$(Q)SUDO='$(SUDO)' jobs/setup-debian.sh judge pictures $(DEPS)
	$(Q)$(MAKE) --no-print-directory all tests
	$(Q)HAPT_LONG=1 HAPT_TEST_SECONDS=7200 tests/run $(BUILD) '$(TESTS)'

bench: deps
	$(Q)$(MAKE) --no-print-directory all benches inputs
	$(Q)bench/run

# The simulator against steps that others measured, and against another simulator, where it is installed.
judge:
	$(Q)SUDO='$(SUDO)' jobs/setup-debian.sh judge
	$(Q)$(MAKE) --no-print-directory build/hapt
	$(Q)bench/judge

asan: deps
	$(Q)$(MAKE) --no-print-directory VARIANT=asan build/asan/hapt asan-tests
	$(Q)ASAN_OPTIONS=detect_leaks=0 tests/run build/asan "$(or $(TESTS),^unit/)"

asan-tests: $(tests)

# Three ranks train under a sanitizer; `make check-long` does so under all three.
tsan lsan: deps
	$(Q)$(MAKE) --no-print-directory VARIANT=$@ build/$@/hapt
	$(Q)HAPT_LONG=1 HAPT_TEST_SECONDS=3600 SANITIZERS=$@ tests/run build/$@ '^system/sanitizers$$'

# Damaged inputs under sanitizers: FUZZ_INPUTS of them, FUZZ_SEED repeats a campaign (the seed is printed), FUZZ_JOBS at a time.
FUZZ_INPUTS ?= 100000
FUZZ_JOBS ?= $(shell nproc)
fuzz: deps
	$(Q)$(MAKE) --no-print-directory VARIANT=asan build/asan/tests/fuzz/fuzz
	$(Q)mkdir -p build/fuzz
	$(Q)OMP_NUM_THREADS=1 build/asan/tests/fuzz/fuzz --inputs $(FUZZ_INPUTS) --seed "$(FUZZ_SEED)" --jobs $(FUZZ_JOBS) --keep build/fuzz tests/fuzz/corpus

# The tests that need a GPU. Without one it builds everything and says that nothing ran.
check-gpu: deps
	$(Q)$(MAKE) --no-print-directory build/hapt $(cuda_plugin) $(gpu_programs)
	$(Q)tests/gpu/run $(BUILD) || [ $$? -eq 77 ]

# For a machine with a GPU and little else: executables that find their libraries in the bundle, as those libraries do theirs (RPATH).
# PETSc, which is loaded where it is, stays out.
gpu-bundle: deps
	$(Q)$(MAKE) --no-print-directory build/hapt $(cuda_plugin) inputs bundle-parts
	$(Q)jobs/gpu-bundle.sh $(BUILD)/bundle $(BUILD)/hapt-cuda.so build/hapt-gpu.tar.gz

bundle-parts: $(patsubst $(BUILD)/%,$(BUILD)/bundle/%,$(BUILD)/hapt $(gpu_programs))

BUNDLE_LINK := -Wl,--disable-new-dtags,-rpath,'$$ORIGIN/../../lib:$$ORIGIN/../../../../lib'
$(BUILD)/bundle/hapt: $(program_objects) $(BUILD)/libhapt.a
	@echo "LD   $@"
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(OPTIMIZE) $(EXECUTABLE) -o $@ $^ $(LIBS) $(BUNDLE_LINK)

$(BUILD)/bundle/tests/%: tests/%.c $(BUILD)/libhapt.a
	@echo "LD   $@"
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(OPTIMIZE) -Itests -MMD -MP -MF $@.d $(EXECUTABLE) -o $@ $< $(BUILD)/libhapt.a $(LIBS) $(BUNDLE_LINK)

# Checks and reasons: .clang-tidy. Kernels are left out: they are tables of macros.
tidy_flags = -std=c11 -DHAPT_COMMIT='"tidy"' -D_GNU_SOURCE -I$(CURDIR)/include $(PACKAGE_CFLAGS) $(PETSC_CFLAGS) $(PETSC_NAMES) $(shell $(CC) --showme:compile 2>/dev/null)
tidy:
	$(Q)clang-tidy --list-checks >/dev/null
	$(Q)mkdir -p build/tidy && printf '%s\n' $(tidy_flags) >build/tidy/compile_flags.txt
	$(Q)printf '%s\n' $(plain_sources) $(program_sources) | xargs -P "$$(nproc)" -n 8 clang-tidy --quiet -p build/tidy 2>/dev/null
	@echo "clang-tidy finds nothing"

# Versions of clang-format differ: 14 is Debian 12's and Ubuntu 22.04's.
formatted = $(shell find src include tests bench -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')
format:
	$(Q)$(CLANG_FORMAT) -i $(formatted)

format-check:
	$(Q)$(CLANG_FORMAT) --version | grep -q 'version 14\.' || { echo "format-check: error: $(CLANG_FORMAT) is not of version 14" >&2; echo "hint: CLANG_FORMAT=clang-format-14 (Debian: clang-format-14)" >&2; exit 2; }
	$(Q)$(CLANG_FORMAT) --dry-run -Werror $(formatted)
	@echo "the formatter agrees"

check-layers:
	$(Q)tests/check-layers

# Files go to DESTDIR/PREFIX, and uninstall removes what install has put there (packaging/install.sh).
PREFIX ?= /usr/local
install: all
	$(Q)packaging/install.sh install '$(PREFIX)' '$(DESTDIR)' $(BUILD)

uninstall:
	$(Q)packaging/install.sh uninstall '$(PREFIX)' '$(DESTDIR)'

clean:
	$(Q)rm -rf build

help:
	@echo "targets:   all tests benches install uninstall run check check-quick check-long check-hold check-gpu gpu-bundle bench judge asan tsan lsan fuzz tidy format format-check check-layers inputs deps clean help"
	@echo "variables: V=1 shows commands; WERROR=1 makes warnings errors; TESTS=REGEX picks tests (unit/plan, ^system); BASE=COMMIT of check-hold;"
	@echo "           FUZZ_INPUTS=N, FUZZ_SEED=N, FUZZ_JOBS=N for fuzz; VARIANT=release|asan|tsan|lsan; PREFIX=/usr/local, DESTDIR for install and uninstall; HAPT_COMMIT=HASH for sources without .git; PETSC=0 leaves its solver out, CUDA=0 the back end of GPUs (CUDA_HOME: the toolkit, CUDA_ARCHS='75 80 90': for which; CUDA_QUICK=1: compiled in a quarter of the time, slow), NCCL=0 its collectives, CUDNN=0 its convolutions by cuDNN; HARDEN=0 leaves the hardening of the build out; SUDO=sudo lets deps install as another user than root, DEPS='bench judge lab' more groups; CC, CFLAGS, LDFLAGS as usual"

.PHONY: FORCE all tests benches install uninstall run check check-quick check-long check-hold check-gpu gpu-bundle bundle-parts without_cuda bench judge asan asan-tests tsan lsan fuzz tidy format format-check check-layers inputs deps clean help
.SECONDARY:
