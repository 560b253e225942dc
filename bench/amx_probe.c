/* Does TDPBF16PS compute the chain that docs/arithmetic.md defines? amx_probe [cases]: one line of JSON (bench/amx.py).
 *
 * A case is one element of a tile after one TDPBF16PS of depth 32. `chain` counts those unlike the definition: even and odd
 * sums by fused multiply-add from zero, added together, added to what stood there; `serial` those unlike the other reading
 * of Intel's papers: every product added to what stood there, one after the other. Denormals are flushed; NaN equals NaN.
 */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static uint64_t state = 0x9E3779B97F4A7C15u;
static uint64_t draw(void) { state ^= state << 13, state ^= state >> 7, state ^= state << 17; return state; }
static float real(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static uint32_t bits_of(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

/* Kinds of operand: any bits, near one, near the least normal, near the largest, and of few values (they cancel). */
static uint16_t operand(int kind)
{
    uint64_t r = draw();
    uint16_t sign = r & 0x8000, mantissa = r >> 16 & 0x7F, spread = r >> 32 & 15;
    switch (kind) {
    case 0: return r >> 40;
    case 1: return sign | (120 + spread) << 7 | mantissa;
    case 2: return sign | (56 + spread) << 7 | mantissa; /* products about 2^-126 */
    case 3: return sign | (183 + spread) << 7 | mantissa; /* products about 2^127 */
    case 4: return sign | (126 + (spread & 1)) << 7;
    default: return sign | (spread < 8 ? 0 : 1) << 7 | mantissa; /* denormals and least normals */
    }
}

static int same(float a, float b) { return (a != a && b != b) || bits_of(a) == bits_of(b); }

static void compare(const uint16_t *a, const uint16_t *b, const float *before, const float *after, int64_t *counts, int kind)
{
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float even = 0, odd = 0, serial = before[m * 16 + n];
            for (int i = 0; i < 16; i++) {
                float a0 = real(a[m * 32 + 2 * i] << 16), a1 = real(a[m * 32 + 2 * i + 1] << 16);
                float b0 = real(b[(i * 16 + n) * 2] << 16), b1 = real(b[(i * 16 + n) * 2 + 1] << 16);
                even = __builtin_fmaf(a0, b0, even), odd = __builtin_fmaf(a1, b1, odd);
                serial = __builtin_fmaf(a1, b1, __builtin_fmaf(a0, b0, serial));
            }
            float sum = even + odd, chain = before[m * 16 + n] + sum, got = after[m * 16 + n];
            if (!same(chain, got) && counts[kind]++ == 0)
                fprintf(stderr, "kind %d: before %08x, definition %08x, tile %08x\n", kind, bits_of(before[m * 16 + n]),
                        bits_of(chain), bits_of(got));
            counts[6] += !same(serial, got);
        }
}

int main(int argc, char **argv)
{
    int64_t cases = argc > 1 ? atoll(argv[1]) : 100000000, counts[7] = {0};
    if (syscall(SYS_arch_prctl, 0x1023, 18)) { /* ARCH_REQ_XCOMP_PERM, tile data */
        printf("{\"amx\": false}\n");
        return 0;
    }
    static uint16_t a[512] __attribute__((aligned(64))), b[512] __attribute__((aligned(64)));
    static float before[256] __attribute__((aligned(64))), after[256] __attribute__((aligned(64)));
    struct { uint8_t palette, start, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    for (int i = 0; i < 3; i++)
        shape.bytes[i] = 64, shape.rows[i] = 16;
    _tile_loadconfig(&shape);
    _mm_setcsr(_mm_getcsr() | 0x8040); /* denormals are zero: as the instruction has it */
    for (int64_t tile = 0; tile < cases / 256; tile++) {
        int kind = tile % 6;
        for (int i = 0; i < 512; i++)
            a[i] = operand(kind), b[i] = operand(kind);
        for (int i = 0; i < 256; i++) {
            int sum = kind == 2 || kind == 5 ? 1 : 127;
            before[i] = real(tile / 6 % 2 ? (uint32_t)draw() : (draw() & 0x807FFFFF) | (uint32_t)(sum + draw() % 8) << 23);
        }
        _tile_loadd(0, before, 64);
        _tile_loadd(1, a, 64);
        _tile_loadd(2, b, 64);
        _tile_dpbf16ps(0, 1, 2);
        _tile_stored(0, after, 64);
        compare(a, b, before, after, counts, kind);
    }
    printf("{\"amx\": true, \"cases\": %lld, \"serial\": %lld, \"chain\": {\"any\": %lld, \"near one\": %lld, \"tiny\": %lld, "
           "\"large\": %lld, \"cancelling\": %lld, \"denormal\": %lld}}\n", (long long)(cases / 256 * 256), (long long)counts[6],
           (long long)counts[0], (long long)counts[1], (long long)counts[2], (long long)counts[3], (long long)counts[4],
           (long long)counts[5]);
    return 0;
}
