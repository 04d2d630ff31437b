#include <surogate/bind.h>

#include "documents.h"
#include "kto_loss.h"
#include "pair_loss.h"
#include "scores.h"

void bind_preference(nanobind::module_& m) {
    surogate::bind_launcher(m, "document_scores", surogate::document_scores);
    surogate::bind_launcher(m, "document_scores_dgrad", surogate::document_scores_dgrad);
    surogate::bind_launcher(m, "document_scores_wgrad", surogate::document_scores_wgrad);
    surogate::bind_launcher(m, "document_sums", surogate::document_sums);
    surogate::bind_launcher(m, "document_sums_bwd", surogate::document_sums_bwd);
    surogate::bind_launcher(m, "kto_loss", surogate::kto_loss);
    surogate::bind_launcher(m, "kto_loss_bwd", surogate::kto_loss_bwd);
    surogate::bind_launcher(m, "pair_loss", surogate::pair_loss);
    surogate::bind_launcher(m, "pair_loss_bwd", surogate::pair_loss_bwd);
}
