/* AMX: the table. Its FAST16 products of K = 3 are its own; everything else is AVX-512's. */
#include "exl3_amx.h"

#include "exl3_avx2.h"
#include "exl3_avx512.h"
#include "weigh.h"

#ifdef GLM53_HAS_AMX
const glm53_tier glm53_tier_amx = {
    .isa = GLM53_ISA_AMX,
    .weigh = glm53_weigh_avx512,
    .dense = &glm53_dense_avx2,
    .has_fast16 = glm53_avx2_has_fast16,
    .decode_block = glm53_avx512_decode_block,
    .hadamard = glm53_avx2_hadamard,
    .prepare = glm53_avx2_prepare_for_avx512,
    .plan = glm53_amx_plan,
    .multiply_exact = glm53_avx512_multiply_exact,
    .multiply_fast = glm53_amx_multiply_fast,
    .finish = glm53_avx2_finish,
    .activate = glm53_avx2_activate,
    .add_scaled = glm53_avx2_add_scaled,
    .widen = glm53_avx2_widen,
};
#else
/* An empty translation unit is not C. */
typedef int glm53_no_amx;
#endif
