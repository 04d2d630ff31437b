#include <surogate/bind.h>

#include "elementwise.h"
#include "norms.h"
#include "reductions.h"

void bind_launchers(nanobind::module_& m) {
    using namespace surogate;
    bind_launcher(m, "add", add);
    bind_launcher(m, "cast", cast);
    bind_launcher(m, "fill", fill);
    bind_launcher(m, "copy", copy);
    bind_launcher(m, "commit", commit);
    bind_launcher(m, "swiglu", swiglu);
    bind_launcher(m, "swiglu_bwd", swiglu_bwd);
    bind_launcher(m, "embedding", embedding);
    bind_launcher(m, "embedding_bwd", embedding_bwd);
    bind_launcher(m, "rmsnorm", rmsnorm);
    bind_launcher(m, "add_rmsnorm", add_rmsnorm);
    bind_launcher(m, "rmsnorm_bwd", rmsnorm_bwd);
    bind_launcher(m, "rmsnorm_dgrad", rmsnorm_dgrad);
    bind_launcher(m, "linear_bgrad", linear_bgrad);
    bind_launcher(m, "accumulate_rounded", accumulate_rounded);
    bind_launcher(m, "square_sums", square_sums);
    bind_launcher(m, "norm_of_sums", norm_of_sums);
}
