/* Everything between this and target_end.h is compiled for AVX2, FMA and F16C, and must run on no other CPU.
 * No include guard: the two belong around the body of a source file, inside #ifdef GLM53_HAS_X86. */
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define INLINE static inline __attribute__((always_inline))
