/* As avx2_begin.h, for the tier of AVX-512: F, BW, VBMI and VNNI (Ice Lake, Zen 4 and later), and what AVX2's
 * tier needs. The body ends with target_end.h. */
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vbmi,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vbmi,avx512vnni")
#endif

#define INLINE static inline __attribute__((always_inline))
