#include "surogate/cublaslt.h"

#include <map>
#include <stdexcept>

#include "surogate/check.h"
#include "surogate/dtype.h"

namespace surogate {
namespace {

constexpr const char* op_name = "gemm";
constexpr size_t minimum_version = 130000;  // later minor versions of CUDA 13 are compatible

int attribute(cudaDeviceAttr which) {
    int device = 0, value = 0;
    check_cuda(cudaGetDevice(&device), op_name);
    check_cuda(cudaDeviceGetAttribute(&value, which, device), op_name);
    return value;
}

}  // namespace

Library cublaslt() {
    static const Library handle = at_least(minimum_version, library("libcublasLt.so.13", "'nvidia-cublas>=13,<14'"),
                                           "cublasLtGetVersion", "'nvidia-cublas>=13,<14'");
    return handle;
}

const CublasLt& lt() {
    static const CublasLt functions;
    return functions;
}

void check_status(cublasStatus_t status, const std::string& what) {
    if (status != CUBLAS_STATUS_SUCCESS) {
        throw std::runtime_error(std::string(op_name) + ": " + what + ": " + lt().GetStatusName(status));
    }
}

cublasLtHandle_t library_handle() {
    static thread_local std::map<int, cublasLtHandle_t> handles;
    int device = 0;
    check_cuda(cudaGetDevice(&device), op_name);
    cublasLtHandle_t& handle = handles[device];
    if (handle == nullptr) {
        check_status(lt().Create(&handle), "cublasLtCreate");
    }
    return handle;
}

int compute_capability() {
    return 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
}

std::string describe_platform() {
    return "cublasLt " + std::to_string(lt().GetVersion()) + ", sm" + std::to_string(compute_capability()) + " x " +
           std::to_string(attribute(cudaDevAttrMultiProcessorCount));
}

Desc make_desc() {
    cublasLtMatmulDesc_t desc = nullptr;
    check_status(lt().MatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    return Desc(desc);
}

Preference make_preference() {
    cublasLtMatmulPreference_t preference = nullptr;
    check_status(lt().MatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    return Preference(preference);
}

Layout row_major(int dtype, int64_t rows, int64_t cols, int64_t ld) {
    cublasLtMatrixLayout_t layout = nullptr;
    check_status(lt().MatrixLayoutCreate(&layout, data_type(dtype), static_cast<uint64_t>(cols),
                                         static_cast<uint64_t>(rows), ld),
                 "cublasLtMatrixLayoutCreate");
    return Layout(layout);
}

void set_batch(const Layout& layout, int64_t count, int64_t stride) {
    const auto matrices = static_cast<int32_t>(count);
    check_status(lt().MatrixLayoutSetAttribute(layout.get(), CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &matrices,
                                               sizeof(matrices)),
                 "cublasLtMatrixLayoutSetAttribute");
    check_status(lt().MatrixLayoutSetAttribute(layout.get(), CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                               sizeof(stride)),
                 "cublasLtMatrixLayoutSetAttribute");
}

cudaDataType_t data_type(int dtype) {
    switch (dtype) {
        case FP32:
            return CUDA_R_32F;
        case BF16:
            return CUDA_R_16BF;
        case E4M3:
            return CUDA_R_8F_E4M3;
        case E5M2:
            return CUDA_R_8F_E5M2;
        case E2M1:
            return CUDA_R_4F_E2M1;
        default:
            throw std::invalid_argument(std::string(op_name) + ": cuBLASLt has no " + name_of(dtype));
    }
}

}  // namespace surogate
