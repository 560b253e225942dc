/* What a back end computes: the table of kernels that kernels.c gives for one target, and what they are told.
 *
 * Rows are fp32, `stride` floats apart. Every kernel works on what it is given and nothing else: run.c divides the work
 * among threads, checks shapes, and sets the modes (modes.h).
 */
#ifndef MANYHANDS_KERNELS_H
#define MANYHANDS_KERNELS_H
#include <stdint.h>

enum { SIDE = 16, DEPTH = 32, BLOCK = 64, CHUNK = 288 }; /* columns of a panel, K of a step, keys of a block, rows of a product */
enum { STATE_BLOCK = 32, DELTA_COLUMNS = 32 }; /* positions of a block of states; columns of a tile of the state of linear attention */
enum { FEW_ROWS = 12 }; /* of a product that widens its weights once for each row, or a few of them */
enum { TURN_BYTES = 8192 }; /* of a panel's steps of K that rows which take turns go through at once: they stay in L1 */
enum { EXPANDED = 2, PANELS = 4, LINE = 64 }; /* steps of K that other products widen at once, for two panels; panels that take turns */
enum { TILED_PANELS = 16 };                   /* panels that take turns of a product in tiles */
/* Of a product. */
enum { EXPANDED_FLOATS = 2 * EXPANDED * DEPTH * SIDE, SCRATCH_BYTES = (EXPANDED_FLOATS + TILED_PANELS * CHUNK * SIDE) * 4 };
/* Types of stored numbers; then of matrices in groups of 32 numbers of K ("small weights" in docs/arithmetic.md), by what a group has.
 * "Less n": n is subtracted from a code; nested: factors of 256 numbers scale those of a group.
 *   W8        codes of 8 bit, a scale
 *   W4, W5    of 4 bit less 8, of 5 bit less 16; a scale
 *   W4M, W5M  of 4 and 5 bit; a scale and a minimum
 *   W4K, W5K  nested; of 4 and 5 bit; a scale and a minimum
 *   W6K       nested; of 6 bit less 32; a scale for 16 numbers
 *   W4F       floats of 4 bit (E2M1); a power of two
 *   W4Z       of 4 bit, less a zero of 4 bit; a scale
 *   W4N, W4X  of 4 bit, which name a number of a table (IQ4); a scale. W4X: nested
 *   W3K, W2K  nested; of 3 bit less 4, of 2 bit; a scale for 16 numbers, and of W2K a minimum for them
 *   W4H       floats of 4 bit (E2M1); a scale of 8 bit (E4M3) for 16 numbers, and one in fp32 for all of a column
 *   W4S, W4T  nested; of 4 bit, which name a number of IQ3_S's table, of IQ3_XXS's; a scale
 *   W3S       nested; of 3 bit, which name a number of IQ2's table; a scale of 4 bit for 16 numbers
 *   W2S       nested; of 2 bit, eight times which less 8, one more or less as a bit for 8 numbers says; a scale of 4 bit for 16 */
#define TYPE_NAMES BF16, F16, F32, W8, W4, W4M, W5, W5M, W4K, W5K, W6K, W4F, W4Z, W4N, W4X, W3K, W2K, W4H, W4S, W4T, W3S, W2S
enum { TYPE_NAMES, TYPES };
/* Codes of 8 bit as caches hold them, no types of a matrix: of values; of keys, each step of which ends with its columns' scales (bf16). */
enum { CODES = -1, SCALED = -2 };
#define INLINE static inline __attribute__((always_inline))

/* Columns [0, n) of x[rows, k] . weight[n, k]^T, packed by panels of 16 columns (panels.h); bias [n] or null. */
typedef struct {
    int64_t type, n, k, activation;
    const void *packed;
    const float *bias;
} Matrix;

/* Rows that a product reads, at most CHUNK, in steps of 32 numbers: as they are, row_step and step_step numbers from a row, and a step, to
 * the next, or in tiles (tiles.h). What the few steps of one pass read lies together, or rows of some thousand numbers would meet in the
 * same sets of a cache. For small weights a Group takes a step's place, or in tiles a RowTile (tile_groups.h) that of 16. */
enum { AS_THEY_ARE, TILED, GROUPED, TILED_GROUPS };
typedef struct {
    float *rows;
    int64_t count, depth, form, row_step, step_step; /* form: one of the above */
} Source;

static inline Source few_rows(float *rows, int64_t count, int64_t depth) { return (Source){rows, count, depth, 0, DEPTH, count * DEPTH}; }

/* Attention of one key head: rows of `queries` [count, groups] heads wide `width`; see attend in kernels.c. */
typedef struct {
    int64_t groups, width, value_width;
    int64_t window;    /* 0 for none, negative for chunks of that length */
    int64_t rounds;    /* to bf16 storage; else fp32 */
    int64_t is_latent; /* a value is the first value_width numbers of its key, and held once */
    int64_t has_codes; /* keys and values are held as codes of 8 bit, with a scale for 32; not latent */
    float scale, soft_cap;
    const float *biases; /* of the first row and head: [extent], by the distance of a key; null for none. bias_stride: to the next row */
    int64_t extent, bias_stride;
    const float *slopes; /* of the first head: this times its distance is subtracted from a key's score; null for none */
} Kind;

/* A key head of a session: in its blocks, `offset` bytes behind the beginning of each. has_panels (index alone): in panels of 16 keys each. */
typedef struct {
    char *const *blocks;
    int64_t offset, has_panels;
} Keys;

/* As Activation in program/ops.py; SITU is a gate's alone, its function of gate and up (Gating in program/expert_ops.py). */
enum { NONE, SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID, SITU };

/* How a row chooses experts (ExpertRouting in program/expert_ops.py); at most MOST_EXPERTS. Of a mixer `epsilon` is its threshold. */
enum { MOST_EXPERTS = 1024 };
enum Score { BY_SOFTMAX, BY_SIGMOID, BY_MIXER, BY_ROOT, BY_LOGIT, SCORE_KINDS };
typedef struct {
    int64_t experts, top_k, score, normalises, groups, top_groups, is_by_best; /* score: Score; is_by_best: groups rank by one expert, else by two */
    float scale, epsilon;
} Routing;

typedef struct {
    const char *name;
    int64_t has_tiles; /* for rows and weights in bf16, and for small weights that fit (fits_tiles) */
    void (*prepare)(const float *x, int64_t stride, int64_t k, int64_t rounds, const Source *to, int64_t first, int64_t count);
    void (*product)(const Matrix *matrix, const Source *source, int64_t panel, int64_t end, float *out, int64_t stride,
                    float *scratch);
    void (*norm)(const float *x, float *out, int64_t n, int64_t is_layer, float epsilon, const float *weight,
                 const float *bias, float offset);
    void (*rotate)(float *x, int64_t turns, int64_t pairs, const float *cos, const float *sin);
    void (*gate)(const float *gate, const float *up, float *out, int64_t n, int64_t activation, float alpha, float limit,
                 float offset);
    void (*add)(const float *x, const float *y, float scale, float *out, int64_t n, int64_t rounds);
    void (*multiply)(const float *x, float by, float *out, int64_t n);
    void (*xielu)(float *x, const float *by, int64_t n);
    void (*remember)(const Kind *kind, const float *key, const float *value, char *keys, int64_t within);
    void (*attend)(const Kind *kind, const float *queries, int64_t query_stride, const Keys *cached, int64_t position,
                   int64_t rows, const float *sinks, float *out, int64_t out_stride, float *scratch);
    void (*index)(const Kind *kind, const float *queries, const float *weights, const Keys *cached, int64_t first, int64_t blocks,
                  float *scores, float *scratch);
    void (*widen)(const void *stored, int64_t type, float scale, float *out, int64_t n, int64_t rounds);
    void (*narrow)(const float *x, void *stored, int64_t type, int64_t n);
    void (*soften)(float *logits, int64_t n, float scale, float soft_cap);
    void (*route)(const Routing *routing, const float *logits, const float *correction, const int32_t *given, float *pairs);
    void (*convolve)(const float *const *rows, int64_t taps, const float *weights, int64_t stride, const float *bias, int64_t activation,
                     int64_t n, float *out);
    void (*delta)(int64_t width, int64_t form, float *state, int64_t n, const float *query, const float *key, const float *value,
                  const float *decay, float strength, float *out);
    void (*scan)(int64_t width, float *state, int64_t n, const float *query, const float *key, const float *value, const float *step,
                 const float *rates, int64_t stride, const float *skips, float *out);
    void (*decay)(const float *x, const float *rates, const float *bias, float bound, float *out, int64_t n);
    void (*pool)(const float *gates, const float *values, int64_t count, int64_t stride, int64_t n, float *out);
    float (*inverse)(const float *x, int64_t n, float epsilon);
    void (*apply)(int64_t function, float alpha, const float *x, float *out, int64_t n);
    void (*round_weights)(int64_t type, const float *x, uint8_t *codes, uint16_t *factors);
    const void *attention; /* its chains (kernels.c), for tiles, which have none of their own */
} Kernels;

/* Of linear attention: the delta rule, the plain sum, the delta rule with a decay for each number of a key; a selective scan. */
enum { DELTA_RULE, DELTA_SUM, DELTA_BY_CHANNEL, DELTA_SCAN };
enum { ZEN5 = 26 };
extern int mh_amd; /* the family of an AMD CPU, else 0: weights are fetched in other ways there (Zen 3, 4: 25) */
/* How a product fetches the weights that it comes to.
 * SOON: into L1, soon before. FAR: into L2, long before: on Zen 4, 3 to 12 rows are up to 1.3 times as fast so, small weights up to 1.4;
 * one row of bf16 0.8 times. ONCE: as SOON, for a step that does not read them again: AMD's cores do not move such lines to L2 and L3,
 * where the code and data of what runs between two steps stay. On Zen 5 that took two thirds of its time; Zen 4 was not tried, and is
 * not fetched so. */
typedef enum { SOON, FAR, ONCE } Fetch;
INLINE void fetch_weights(Fetch how, const void *at)
{
    if (how == FAR)
        __builtin_prefetch((const char *)at + 16384, 0, 2);
    else if (how == ONCE)
        __builtin_prefetch((const char *)at + 4096, 0, 0);
    else
        __builtin_prefetch((const char *)at + 4096);
}
extern int mh_has_dot;     /* whether this CPU multiplies bytes and sums by fours: AVX-512 VNNI, ARM's dot product */
extern int mh_has_avx_dot; /* whether it does so in registers of AVX2: AVX-VNNI */
extern const Kernels kernels_scalar, kernels_avx2, kernels_avx512, kernels_neon;
extern Kernels kernels_amx __attribute__((weak)); /* of tiles; machine.c adds the rest, AVX-512's; absent where the compiler knows no tiles */

static inline float root_of(float x) /* IEEE, without a library */
{
#if defined(__x86_64__)
    __asm__("sqrtss %0, %0" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("fsqrt %s0, %s0" : "+w"(x));
#else
#error "no square root"
#endif
    return x;
}
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t size_of_type(int64_t type) { return type == F32 ? 4 : type < 0 ? 1 : 2; }
static inline int is_small(int64_t type) { return type >= W8; }

/* 32 numbers of a row as integers: number i is codes[i] * scale. sums: of the first 16 codes, and of the others. */
typedef struct {
    float scale;
    int16_t sums[2];
    int8_t codes[DEPTH];
} Group;
enum { GROUP_FLOATS = sizeof(Group) / 4 };
static inline const Group *group_at(const char *rows, int64_t step) { return (const Group *)(rows + step); }
static inline int32_t group_sum(const Group *group) { return group->sums[0] + group->sums[1]; }
static inline Source grouped_rows(float *rows, int64_t count, int64_t depth)
{
    return (Source){rows, count, depth, GROUPED, GROUP_FLOATS, count * GROUP_FLOATS};
}

/* Numbers of a panel of 16 columns whose K takes `depth` steps. */
static inline int64_t panel_size(int64_t depth) { return depth * DEPTH * SIDE; }
/* Bytes of a step of such a panel. */
static inline int64_t step_bytes(int64_t type) { return panel_size(1) * size_of_type(type) + (type == SCALED ? 2 * SIDE : 0); }

/* A panel of small weights: the codes of all steps, then their factors.
 *
 * Codes lie as [K / 4][column][4 numbers of K]; of less than 8 bits, the low 4 of numbers [0, 16) of a step lie in the low halves of
 * bytes, those of [16, 32) in the high ones. The fifth bits follow, a byte for 8 numbers: bit j of byte [column][k % 4] is number
 * 4 j + k % 4; or the fifth and sixth, two bytes for 8 numbers: bits 2 j and 2 j + 1 of [k / 16][column][k % 4] are number
 * 16 (k / 16) + 4 j + k % 4. Codes of 2 bit lie as the latter, of 3 bit so their low two, then their third as the former.
 * Factors of a step are one a column: 16 scales in fp16, then of types with minima 16 of these; of W4F 16 exponents; of W4Z 16 scales,
 * then the zeros of columns c and c + 8 in the low and high half of byte c; of W4H 16 scales in E4M3 of numbers [0, 16) of a step, then 16
 * of the others, and behind those of all steps 16 floats: columns' scales times 2^7.
 * Nested ones lie by NEST steps: 16 scales in fp16, of types with minima 16 of these; then of each step
 *   W4K, W5K       16 scales and 16 minima of a byte
 *   W6K, W3K       16 pairs of scales
 *   W4X, W4S, W4T  16 scales with a sign
 *   W3S            16 pairs of 4 bit: scales of the first and second half
 *   W2K            16 pairs, of 4 bit each: scale, then minimum
 *   W2S            16 pairs: a scale of 4 bit, then a bit each of numbers [0, 8) and [8, 16): one less, not more */
enum { NEST = 8 }; /* steps that share factors */
/* A table, and a scale of a byte for 32 numbers. */
static inline int is_table_nested(int64_t type) { return type == W4X || type == W4S || type == W4T; }
static inline int is_nested(int64_t type) { return (type >= W4K && type <= W6K) || is_table_nested(type) || type == W3K || type == W2K || type == W3S || type == W2S; }
/* A scale for 16 numbers. */
static inline int has_halves(int64_t type) { return type == W6K || type == W3K || type == W2K || type == W3S || type == W2S || type == W4H; }
static inline int fits_tiles(int64_t type) { return !has_halves(type) || type == W4H; } /* AMX's: of small weights */
static inline int has_floats(int64_t type) { return type == W4F || type == W4H; }
static inline int has_table(int64_t type) { return type == W4N || is_table_nested(type) || type == W3S; }
static inline int has_minima(int64_t type) { return type == W4M || type == W5M || type == W4K || type == W5K || type == W2K; }
static inline int64_t code_bits(int64_t type)
{
    return type == W8                                 ? 8
           : type == W6K                              ? 6
           : type == W3K || type == W3S               ? 3
           : type == W2K || type == W2S               ? 2
           : type == W5 || type == W5M || type == W5K ? 5
                                                      : 4;
}
static inline int32_t code_offset(int64_t type) { return type == W4 ? 8 : type == W5 ? 16 : type == W6K ? 32 : has_floats(type) ? 12 : type == W3K ? 4 : type == W2S ? 16 : 0; }
static inline int64_t code_bytes(int64_t type) { return code_bits(type) * DEPTH * SIDE / 8; }
static inline int64_t shared_bytes(int64_t type) { return has_minima(type) ? 4 * SIDE : 2 * SIDE; } /* of NEST steps */
static inline int64_t own_bytes(int64_t type) { return is_table_nested(type) || type == W3S ? SIDE : 2 * SIDE; } /* of each */
static inline int64_t factor_bytes(int64_t type)
{
    return is_nested(type)    ? own_bytes(type) + shared_bytes(type) / NEST
           : type == W4F      ? SIDE
           : has_minima(type) ? 4 * SIDE
           : type == W4Z      ? 2 * SIDE + SIDE / 2
                              : 2 * SIDE;
}
static inline int64_t panel_bytes(int64_t type, int64_t depth)
{
    return is_small(type) ? depth * (code_bytes(type) + factor_bytes(type)) + (type == W4H ? 4 * SIDE : 0) : panel_size(depth) * size_of_type(type);
}
/* Where the factors of a step begin, or of the NEST steps that it is of; and its own bytes. */
static inline const uint8_t *factors_at(int64_t type, const uint8_t *panel, int64_t depth, int64_t step)
{
    return panel + depth * code_bytes(type) + (is_nested(type) ? step / NEST * NEST : step) * factor_bytes(type);
}
static inline const uint8_t *subs_at(int64_t type, const uint8_t *factors, int64_t step)
{
    return factors + shared_bytes(type) + step % NEST * own_bytes(type);
}

/* Of W4H: 2^7 times the scales of columns. */
static inline const float *column_scales_at(const uint8_t *panel, int64_t depth)
{
    return (const float *)(panel + depth * (code_bytes(W4H) + factor_bytes(W4H)));
}
/* The zero of column c of a step of W4Z, which get_code does not take off. */
static inline int zero_at(const uint8_t *factors, int64_t c) { return factors[2 * SIDE + c % (SIDE / 2)] >> c / (SIDE / 2) * 4 & 15; }

/* Twice the numbers that a float of 4 bit can be, more by 12. */
static const uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
/* The numbers of IQ4. */
static const int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
/* Of IQ3_S, and of IQ3_XXS, whose scales are a fourth of what is held: number 15 - i is that of i with the other sign. */
static const int8_t IQ3_S[16] = {-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15};
static const int8_t IQ3_XXS[16] = {-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62};
/* Of IQ2, whose scales are an eighth of what is held, 1 + 2 i of each i: codes of 3 bit, 7 - i in place of 15 - i; 0 and 7 are none. */
static const int8_t IQ2[16] = {0, -43, -25, -8, 8, 25, 43};
/* What codes name, of types that have a table or floats. */
static inline const int8_t *names_of(int64_t type)
{
    return type == W4S ? IQ3_S : type == W4T ? IQ3_XXS : type == W3S ? IQ2 : has_floats(type) ? (const int8_t *)E2M1 : IQ4;
}
/* A power of two that scales are times. */
static inline float unit_of(int64_t type) { return type == W4T ? 0.25f : type == W3S || type == W2S ? 0.125f : 1; }
/* Of W3S: the scale of half a step. */
static inline int half_scale(uint8_t both, int64_t half) { return 1 + 2 * (both >> 4 * half & 15); }
/* Of W2S: what number k of column c of a step is less by than get_code says. */
static inline int less_at(const uint8_t *subs, int64_t k, int64_t c) { return subs[2 * c + k / SIDE] >> (4 + k % SIDE / 8) << 1 & 2; }
/* Number k of column c of a step, less the type's offset, or what it names. */
static inline int get_code(int64_t type, const int8_t *names, const uint8_t *codes, int64_t k, int64_t c)
{
    int64_t place = c * 4 + k % 4, four = k % 16 / 4, half = k / 16;
    const uint8_t *highs = codes + DEPTH * SIDE / 2;
    if (type == W8)
        return (int8_t)codes[k / 4 * 64 + place];
    if (code_bits(type) < 4) {
        int third = code_bits(type) == 2 ? 0 : codes[128 + place] >> (4 * half + four) & 1;
        int code = (codes[half * 64 + place] >> 2 * four & 3) + third * 4;
        return has_table(type) ? names[code] : (type == W2S ? 8 * code + 9 : code) - code_offset(type);
    }
    int code = codes[four * 64 + place] >> 4 * half & 15;
    if (code_bits(type) == 5)
        code |= (highs[place] >> (4 * half + four) & 1) << 4;
    if (type == W6K)
        code |= (highs[half * 64 + place] >> 2 * four & 3) << 4;
    return has_table(type) ? names[code] : (has_floats(type) ? E2M1[code] : code) - code_offset(type);
}

/* Where column c, row k of a panel lies: bf16 in pairs of rows, others by even and odd rows. */
static inline int64_t place_in_panel(int64_t type, int64_t k, int64_t c)
{
    int64_t pair = k / 2 * DEPTH;
    return type == BF16 ? pair + c * 2 + k % 2 : pair + k % 2 * SIDE + c;
}

/* A block of 64 positions of one key head: 4 panels of keys, then the panels of values, whose K is the position (none where
 * values are latents). Behind values that are codes lie their scales (bf16), for each 32 columns those of the 64 positions. */
static inline int64_t plain_type(const Kind *kind) { return kind->rounds ? BF16 : F32; }
static inline int64_t key_type(const Kind *kind) { return kind->has_codes ? SCALED : plain_type(kind); }
static inline int64_t value_type(const Kind *kind) { return kind->has_codes ? CODES : plain_type(kind); }
static inline int64_t key_bytes(const Kind *kind) { return BLOCK / SIDE * ceil_div(kind->width, DEPTH) * step_bytes(key_type(kind)); }
static inline int64_t value_codes(const Kind *kind) /* bytes of values without their scales */
{
    return ceil_div(kind->value_width, SIDE) * (BLOCK / DEPTH) * step_bytes(value_type(kind));
}
static inline int64_t value_bytes(const Kind *kind)
{
    return value_codes(kind) + (kind->has_codes ? ceil_div(kind->value_width, DEPTH) * BLOCK * 2 : 0);
}
static inline int64_t block_bytes(const Kind *kind) { return key_bytes(kind) + (kind->is_latent ? 0 : value_bytes(kind)); }

/* Rows (positions times query heads) that attend takes at once in tiles, and otherwise: their scores and sums stay in L1 and L2; rows for
 * which tiles do not pay. */
enum { TILE_ROWS = 32, CHAIN_ROWS = 24, FEW_TILED = 2, FEW_TILED_GROUPS = 7 };
/* Bytes of scratch that attend needs; and index. */
static inline int64_t attend_scratch(const Kind *kind)
{
    int64_t floats = ceil_div(kind->width, DEPTH) * DEPTH + ceil_div(kind->value_width, SIDE) * SIDE;
    return TILE_ROWS * floats * 4 + (kind->is_latent ? value_bytes(kind) : 0);
}
static inline int64_t index_scratch(const Kind *kind) /* of queries, and of their products with a block */
{
    return ceil_div(kind->groups, TILE_ROWS) * TILE_ROWS * (ceil_div(kind->width, DEPTH) * DEPTH + BLOCK) * 4;
}
#endif
