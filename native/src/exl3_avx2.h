/* Kernels of the AVX2 table that live in files of their own. Not installed. */
#ifndef GLM53_EXL3_AVX2_H
#define GLM53_EXL3_AVX2_H

#include "dense.h"
#include "internal.h"

void glm53_avx2_multiply_exact(const glm53_rect *rect);
void glm53_avx2_multiply_fast(const glm53_rect *rect);
void glm53_avx2_decode_block(const glm53_matrix *matrix, int32_t b, float *w);

#endif
