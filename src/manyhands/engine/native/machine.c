/* What this CPU and its system can run. */
#define _GNU_SOURCE
#include "plan.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef TILES_EMULATED
enum { EMULATED = 1 };
#else
enum { EMULATED = 0 };
#endif

enum { SAVES_YMM = 3 << 1, SAVES_ZMM = SAVES_YMM | 7 << 5, SAVES_TILES = 3 << 17 }; /* of XCR0 */

/* Registers that the system saves; 0 if it does not say. */
static unsigned saved(void)
{
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1))
        return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* Whether leaf 7 of cpuid has all of these bits. */
static int has_features(unsigned ebx, unsigned ecx, unsigned edx)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & ebx) == ebx && (c & ecx) == ecx && (d & edx) == edx;
}

static int has_avx2(void)
{
    enum { FMA_AND_F16C = 1 << 12 | 1 << 29 };
    unsigned a, b, c, d;
    return (saved() & SAVES_YMM) == SAVES_YMM && __get_cpuid(1, &a, &b, &c, &d) && (c & FMA_AND_F16C) == FMA_AND_F16C &&
           has_features(1 << 5, 0, 0);
}

static int has_avx512(void)
{
    unsigned f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    return has_avx2() && (saved() & SAVES_ZMM) == SAVES_ZMM && has_features(f_dq_bw_vl, 0, 0);
}

static int has_dot(void)
{
    enum { AVX512_VNNI = 1 << 11 };
    return has_avx512() && has_features(0, AVX512_VNNI, 0);
}

/* Tiles for bf16 and bytes, if the system lets this process use them. */
static int has_tiles(void)
{
    enum { REQUEST = 0x1023, TILE_DATA = 18, ALL_OF_AMX = 1 << 22 | 1 << 24 | 1 << 25 };
    if (EMULATED)
        return has_avx2();
    return has_dot() && has_features(0, 0, ALL_OF_AMX) && (saved() & SAVES_TILES) == SAVES_TILES &&
           syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

static int has_avx_dot(void)
{
    enum { AVX_VNNI = 1 << 4 };
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & AVX_VNNI;
}

static int amd_family(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || c != signature_AMD_ecx || d != signature_AMD_edx)
        return 0;
    return __get_cpuid(1, &a, &b, &c, &d) ? (int)((a >> 8 & 15) + (a >> 20 & 255)) : 0;
}

/* What kernels.c leaves open for tiles is AVX-512's. */
static void complete_amx(void)
{
    if (!&kernels_amx)
        return;
    Kernels all = kernels_avx512, tiles = kernels_amx;
    all.name = tiles.name, all.has_tiles = tiles.has_tiles;
    all.prepare = tiles.prepare, all.product = tiles.product, all.attend = tiles.attend, all.index = tiles.index;
    kernels_amx = all;
}

static int find(int64_t target)
{
    return target == 0 || (target == 1 && has_avx2()) || (target == 2 && has_avx512()) ||
           (target == 4 && &kernels_amx && has_tiles());
}
#else
static void complete_amx(void) {}
static int amd_family(void) { return 0; }
static int has_avx_dot(void) { return 0; }
#if defined(__APPLE__)
static int has_dot(void) { return 1; } /* the M1 was the first */
#else
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
static int has_dot(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#endif
static int find(int64_t target) { return target == 0 || target == 3; }
#endif

/* Asked once a target: a virtual machine takes 20 us or more for cpuid. */
EXPORT int mh_supports(int64_t target)
{
    static char known[5]; /* 0: not asked yet; 1: no; 2: yes */
    if (target < 0 || target >= 5)
        return 0;
    if (!__atomic_load_n(known + target, __ATOMIC_RELAXED))
        __atomic_store_n(known + target, (char)(1 + (find(target) != 0)), __ATOMIC_RELAXED);
    return __atomic_load_n(known + target, __ATOMIC_RELAXED) == 2;
}

/* Set when the library is loaded. */
int mh_has_dot, mh_has_avx_dot, mh_amd;
__attribute__((constructor)) static void find_kind(void)
{
    mh_has_dot = has_dot();
    mh_has_avx_dot = has_avx_dot();
    mh_amd = amd_family();
    complete_amx();
}
