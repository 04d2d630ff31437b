# Headers of NVIDIA libraries that are loaded at run time. Compiling needs the headers only, never the libraries.
#
# surogate_find_headers(<variable> <header>...) sets <variable> to the folders to include. Looked at, in this order:
#   1. the folders of SUROGATE_INCLUDE (CMake or environment), separated by ':'
#   2. the CUDA toolkit
#   3. the wheels installed beside the Python of the build (torch brings nvidia-cublas and nvidia-cudnn-cu13)
#   4. ${XDG_CACHE_HOME:-~/.cache}/surogate/headers, filled by fetch_headers.py, which downloads the wheel of the
#      package once (hundreds of megabytes, from which a few are kept). SUROGATE_FETCH_HEADERS=off forbids it.

include_guard(GLOBAL)

set(SUROGATE_PACKAGE_OF_cublasLt.h "nvidia-cublas==13.10.0.20")
set(SUROGATE_PACKAGE_OF_cudnn.h "nvidia-cudnn-cu13==9.28.0.42")
set(SUROGATE_PACKAGE_OF_cudnn_frontend.h "nvidia-cudnn-frontend==1.32.0")
set(SUROGATE_PACKAGE_OF_cutlass/cutlass.h "nvidia-cutlass==4.2.0.0")
set(SUROGATE_PACKAGE_OF_nvrtc.h "nvidia-cuda-nvrtc==13.5.37")

function(surogate_find_headers variable)
  set(folders "")
  set(candidates ${SUROGATE_INCLUDE} $ENV{SUROGATE_INCLUDE})
  string(REPLACE ":" ";" candidates "${candidates}")
  list(APPEND candidates ${CUDAToolkit_INCLUDE_DIRS})
  foreach(site IN ITEMS "${Python_SITELIB}" "${Python_SITEARCH}")
    list(APPEND candidates "${site}/nvidia/cu13/include" "${site}/nvidia/cudnn/include" "${site}/include")
  endforeach()

  foreach(header IN LISTS ARGN)
    find_path(SUROGATE_FOLDER_OF_${header} "${header}" PATHS ${candidates} NO_DEFAULT_PATH)
    if(NOT SUROGATE_FOLDER_OF_${header})
      surogate_fetch_headers(fetched "${header}")
      set(SUROGATE_FOLDER_OF_${header} "${fetched}" CACHE PATH "" FORCE)
    endif()
    message(STATUS "${header}: ${SUROGATE_FOLDER_OF_${header}}")
    list(APPEND folders "${SUROGATE_FOLDER_OF_${header}}")
  endforeach()
  list(REMOVE_DUPLICATES folders)
  list(REMOVE_ITEM folders ${CUDAToolkit_INCLUDE_DIRS})
  set(${variable} ${folders} PARENT_SCOPE)
endfunction()

function(surogate_fetch_headers variable header)
  set(package "${SUROGATE_PACKAGE_OF_${header}}")
  if(NOT package)
    message(FATAL_ERROR "${header} was not found. Name its folder in SUROGATE_INCLUDE.")
  endif()
  set(remedy "${header} is needed to compile. Name its folder in SUROGATE_INCLUDE, or install the package in the "
             "environment of the build: pip install --no-deps ${package}")
  if("$ENV{SUROGATE_FETCH_HEADERS}" MATCHES "^(off|0|no|false)$")
    message(FATAL_ERROR ${remedy})
  endif()
  message(STATUS "${header}: from ${package}, downloaded once")
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/fetch_headers.py" "${package}"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR ${remedy})
  endif()
  set(${variable} "${folder}" PARENT_SCOPE)
endfunction()
