/* The AVX-512 instructions that the engine uses, one number after the other as Intel's manual states them, for a machine without them.
 * Included behind immintrin.h, whose types it takes: tests/engine/test_avx512.py. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef union {
    __m512 real;
    __m512i whole;
    float f[16];
    int32_t w[16];
    uint32_t u[16];
    int16_t h[32];
    uint16_t uh[32];
    int8_t b[64];
    uint8_t ub[64];
    __m256i half[2];
    __m256 half_real[2];
} Register;

#define REALS(name, arguments, n, expression) \
    static inline __m512 emulated_##name arguments \
    { \
        Register r; \
        for (int i = 0; i < n; i++) \
            expression; \
        return r.real; \
    }
#define WHOLES(name, arguments, n, expression) \
    static inline __m512i emulated_##name arguments \
    { \
        Register r; \
        for (int i = 0; i < n; i++) \
            expression; \
        return r.whole; \
    }
#define F(x) (((Register){.real = (x)}).f[i])
#define G(x, field) (((Register){.whole = (x)}).field)

REALS(set1_ps, (float a), 16, r.f[i] = a)
REALS(add_ps, (__m512 a, __m512 b), 16, r.f[i] = F(a) + F(b))
REALS(sub_ps, (__m512 a, __m512 b), 16, r.f[i] = F(a) - F(b))
REALS(mul_ps, (__m512 a, __m512 b), 16, r.f[i] = F(a) * F(b))
REALS(div_ps, (__m512 a, __m512 b), 16, r.f[i] = F(a) / F(b))
REALS(max_ps, (__m512 a, __m512 b), 16, r.f[i] = F(a) > F(b) ? F(a) : F(b))
REALS(fmadd_ps, (__m512 a, __m512 b, __m512 c), 16, r.f[i] = __builtin_fmaf(F(a), F(b), F(c)))
REALS(sqrt_ps, (__m512 a), 16, r.f[i] = _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(F(a)))))
REALS(mask_blend_ps, (__mmask16 m, __m512 a, __m512 b), 16, r.f[i] = m >> i & 1 ? F(b) : F(a))
REALS(cvtepi32_ps, (__m512i a), 16, r.f[i] = (float)G(a, w)[i])
REALS(cvtph_ps, (__m256i a), 2, r.half_real[i] = _mm256_cvtph_ps(((__m128i *)&a)[i]))

static inline __m512 emulated_loadu_ps(const void *at)
{
    Register r;
    memcpy(&r, at, 64);
    return r.real;
}
static inline void emulated_storeu_ps(void *at, __m512 a) { memcpy(at, &a, 64); }
static inline __m512i emulated_loadu_si512(const void *at) { return (Register){.real = emulated_loadu_ps(at)}.whole; }
static inline __mmask16 emulated_cmp_ps_mask(__m512 a, __m512 b, int kind)
{
    int found = 0;
    for (int i = 0; i < 16; i++)
        found |= (kind == _CMP_LT_OQ ? F(a) < F(b) : F(a) != F(a) || F(b) != F(b)) << i;
    return (__mmask16)found;
}
static inline __mmask64 emulated_movepi8_mask(__m512i a)
{
    __mmask64 found = 0;
    for (int i = 0; i < 64; i++)
        found |= (__mmask64)(G(a, b)[i] < 0) << i;
    return found;
}
static inline __m256i emulated_cvtepi32_epi16(__m512i a)
{
    union {
        __m256i all;
        int16_t h[16];
    } r;
    for (int i = 0; i < 16; i++)
        r.h[i] = (int16_t)G(a, w)[i];
    return r.all;
}
static inline int16_t emulated_saturated(int32_t a) { return (int16_t)(a > 32767 ? 32767 : a < -32768 ? -32768 : a); }

WHOLES(setzero_si512, (void), 16, r.w[i] = 0)
WHOLES(set1_epi32, (int32_t a), 16, r.w[i] = a)
WHOLES(set1_epi16, (int16_t a), 32, r.h[i] = a)
WHOLES(set1_epi8, (int8_t a), 64, r.b[i] = a)
WHOLES(broadcast_i32x4, (__m128i a), 64, r.b[i] = ((int8_t *)&a)[i % 16])
WHOLES(castsi256_si512, (__m256i a), 2, r.half[i] = a)
WHOLES(inserti64x4, (__m512i a, __m256i b, int at), 2, r.half[i] = i == at ? b : G(a, half)[i])
WHOLES(and_si512, (__m512i a, __m512i b), 16, r.u[i] = G(a, u)[i] & G(b, u)[i])
WHOLES(or_si512, (__m512i a, __m512i b), 16, r.u[i] = G(a, u)[i] | G(b, u)[i])
WHOLES(xor_si512, (__m512i a, __m512i b), 16, r.u[i] = G(a, u)[i] ^ G(b, u)[i])
WHOLES(add_epi32, (__m512i a, __m512i b), 16, r.u[i] = G(a, u)[i] + G(b, u)[i])
WHOLES(sub_epi32, (__m512i a, __m512i b), 16, r.u[i] = G(a, u)[i] - G(b, u)[i])
WHOLES(mullo_epi32, (__m512i a, __m512i b), 16, r.u[i] = G(a, u)[i] * G(b, u)[i])
WHOLES(max_epi32, (__m512i a, __m512i b), 16, r.w[i] = G(a, w)[i] > G(b, w)[i] ? G(a, w)[i] : G(b, w)[i])
WHOLES(slli_epi32, (__m512i a, unsigned by), 16, r.u[i] = G(a, u)[i] << by)
WHOLES(srli_epi32, (__m512i a, unsigned by), 16, r.u[i] = G(a, u)[i] >> by)
WHOLES(srai_epi32, (__m512i a, unsigned by), 16, r.w[i] = G(a, w)[i] >> by)
WHOLES(add_epi8, (__m512i a, __m512i b), 64, r.b[i] = (int8_t)(G(a, b)[i] + G(b, b)[i]))
WHOLES(add_epi16, (__m512i a, __m512i b), 32, r.h[i] = (int16_t)(G(a, h)[i] + G(b, h)[i]))
WHOLES(slli_epi16, (__m512i a, unsigned by), 32, r.uh[i] = (uint16_t)(G(a, uh)[i] << by))
WHOLES(srli_epi16, (__m512i a, unsigned by), 32, r.uh[i] = (uint16_t)(G(a, uh)[i] >> by))
WHOLES(abs_epi8, (__m512i a), 64, r.b[i] = (int8_t)(G(a, b)[i] < 0 ? -G(a, b)[i] : G(a, b)[i]))
WHOLES(mask_blend_epi32, (__mmask16 m, __m512i a, __m512i b), 16, r.u[i] = m >> i & 1 ? G(b, u)[i] : G(a, u)[i])
WHOLES(mask_sub_epi8, (__m512i from, __mmask64 m, __m512i a, __m512i b), 64,
       r.b[i] = m >> i & 1 ? (int8_t)(G(a, b)[i] - G(b, b)[i]) : G(from, b)[i])
WHOLES(shuffle_epi8, (__m512i a, __m512i at), 64, r.b[i] = G(at, b)[i] < 0 ? 0 : G(a, b)[i / 16 * 16 + (G(at, b)[i] & 15)])
WHOLES(shufflelo_epi16, (__m512i a, int at), 32, r.h[i] = G(a, h)[i % 8 < 4 ? i / 8 * 8 + (at >> 2 * (i % 4) & 3) : i])
WHOLES(shufflehi_epi16, (__m512i a, int at), 32, r.h[i] = G(a, h)[i % 8 < 4 ? i : i / 8 * 8 + 4 + (at >> 2 * (i % 4) & 3)])
WHOLES(cvtepi8_epi16, (__m256i a), 32, r.h[i] = ((int8_t *)&a)[i])
WHOLES(cvtepu8_epi16, (__m256i a), 32, r.h[i] = ((uint8_t *)&a)[i])
WHOLES(cvtepi8_epi32, (__m128i a), 16, r.w[i] = ((int8_t *)&a)[i])
WHOLES(cvtepu8_epi32, (__m128i a), 16, r.w[i] = ((uint8_t *)&a)[i])
WHOLES(cvtepu16_epi32, (__m256i a), 16, r.w[i] = ((uint16_t *)&a)[i])
WHOLES(madd_epi16, (__m512i a, __m512i b), 16, r.w[i] = G(a, h)[2 * i] * G(b, h)[2 * i] + G(a, h)[2 * i + 1] * G(b, h)[2 * i + 1])
WHOLES(maddubs_epi16, (__m512i a, __m512i b), 32,
       r.h[i] = emulated_saturated(G(a, ub)[2 * i] * G(b, b)[2 * i] + G(a, ub)[2 * i + 1] * G(b, b)[2 * i + 1]))
WHOLES(dpbusd_epi32, (__m512i sum, __m512i a, __m512i b), 16,
       r.w[i] = G(sum, w)[i] + G(a, ub)[4 * i] * G(b, b)[4 * i] + G(a, ub)[4 * i + 1] * G(b, b)[4 * i + 1] +
                G(a, ub)[4 * i + 2] * G(b, b)[4 * i + 2] + G(a, ub)[4 * i + 3] * G(b, b)[4 * i + 3])
static inline __mmask16 emulated_test_epi32_mask(__m512i a, __m512i b)
{
    __mmask16 mask = 0;
    for (int i = 0; i < 16; i++)
        mask |= (__mmask16)((G(a, u)[i] & G(b, u)[i]) != 0) << i;
    return mask;
}
static inline __m512i emulated_castps_si512(__m512 a) { return (Register){.real = a}.whole; }
static inline __m512 emulated_castsi512_ps(__m512i a) { return (Register){.whole = a}.real; }
static inline __m256 emulated_castps512_ps256(__m512 a) { return (Register){.real = a}.half_real[0]; }
static inline __m256 emulated_extractf32x8_ps(__m512 a, int at) { return (Register){.real = a}.half_real[at]; }
