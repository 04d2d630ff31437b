// The functions of cuBLASLt, its handles, and owners of its descriptors: `surogate_add_kernels(my_package USES cublaslt)`.
// The library is loaded at run time (`library.h`).
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "surogate/library.h"

namespace surogate {

// Loads cuBLASLt on the first call and checks its version. Later calls return the same handle. Thread-safe.
Library cublaslt();

struct CublasLt {
#define SUROGATE_LT(name) decltype(&cublasLt##name) name = symbol<decltype(&cublasLt##name)>(cublaslt(), "cublasLt" #name)
    SUROGATE_LT(Create);
    SUROGATE_LT(GetVersion);
    SUROGATE_LT(GetStatusName);
    SUROGATE_LT(Matmul);
    SUROGATE_LT(MatmulDescCreate);
    SUROGATE_LT(MatmulDescDestroy);
    SUROGATE_LT(MatmulDescSetAttribute);
    SUROGATE_LT(MatrixLayoutCreate);
    SUROGATE_LT(MatrixLayoutDestroy);
    SUROGATE_LT(MatrixLayoutSetAttribute);
    SUROGATE_LT(MatmulPreferenceCreate);
    SUROGATE_LT(MatmulPreferenceDestroy);
    SUROGATE_LT(MatmulPreferenceSetAttribute);
    SUROGATE_LT(MatmulAlgoGetHeuristic);
    SUROGATE_LT(MatmulAlgoCheck);
    SUROGATE_LT(MatmulAlgoConfigGetAttribute);
#undef SUROGATE_LT
};

const CublasLt& lt();

// Throws std::runtime_error "gemm: what: status" if a call failed.
void check_status(cublasStatus_t status, const std::string& what);

// Returns the handle of this thread for the current device. Handles live until the process ends, because products keep
// them.
cublasLtHandle_t library_handle();

int compute_capability();  // of the current device, such as 90

// Describes what the choice of an algorithm depends on besides the product: the version of cuBLASLt and the kind of
// GPU.
std::string describe_platform();

struct DestroyDesc {
    void operator()(cublasLtMatmulDesc_t desc) const { lt().MatmulDescDestroy(desc); }
};
struct DestroyLayout {
    void operator()(cublasLtMatrixLayout_t layout) const { lt().MatrixLayoutDestroy(layout); }
};
struct DestroyPreference {
    void operator()(cublasLtMatmulPreference_t preference) const { lt().MatmulPreferenceDestroy(preference); }
};
using Desc = std::unique_ptr<std::remove_pointer_t<cublasLtMatmulDesc_t>, DestroyDesc>;
using Layout = std::unique_ptr<std::remove_pointer_t<cublasLtMatrixLayout_t>, DestroyLayout>;
using Preference = std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>, DestroyPreference>;

// Of a product with fp32 sums and scales.
Desc make_desc();
Preference make_preference();

// cuBLASLt's default layout is column-major: a row-major [rows, cols] matrix is a column-major [cols, rows] one. `ld`:
// row stride in elements.
Layout row_major(int dtype, int64_t rows, int64_t cols, int64_t ld);

// Makes it the layout of `count` matrices, each `stride` elements after the one before it.
void set_batch(const Layout& layout, int64_t count, int64_t stride);

cudaDataType_t data_type(int dtype);  // FP32, BF16, E4M3, E5M2 or E2M1

template <class T>
void set(const Desc& desc, cublasLtMatmulDescAttributes_t attribute, T value) {
    check_status(lt().MatmulDescSetAttribute(desc.get(), attribute, &value, sizeof(value)),
                 "cublasLtMatmulDescSetAttribute");
}

template <class T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    check_status(lt().MatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)),
                 "cublasLtMatmulPreferenceSetAttribute");
}

}  // namespace surogate
