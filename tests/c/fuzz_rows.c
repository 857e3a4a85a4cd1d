// The functions on rows of a matrix: the gated MLP, cross entropy; and the multiply-add peak.
#include "fuzz.h"

#include "../../csrc/bench/multiply_add.h"
#include "../../csrc/dropout/philox.h"

enum { GATE, UP, PROD, NUM_GLU, LOGITS = 0, LABELS, LOSS, LSE, NUM_LOSS };

static bool is_dtype(rt_dtype dtype) { return (int)dtype >= 0 && dtype <= RT_F16; }

static verdict judge_blocks(const block *x, int count, verdict result) {
    for (int i = 0; i < count; i++) {
        const verdict of_block = judge_block(&x[i]);
        result = worse(result, of_block == UNKNOWN ? result : of_block);
    }
    return result;
}

static void make_blocks(block *x, block *copies, int count, uint64_t *state) {
    for (int i = 0; i < count; i++) {
        make_block(&x[i], state);
        copies[i] = copy_of(&x[i]);
    }
}

static void free_blocks(block *x, block *copies, int count) {
    for (int i = 0; i < count; i++) free(x[i].memory), free(copies[i].memory);
}

// ---- gated MLP ---------------------------------------------------------------------------------------------

static double activation(rt_glu_kind kind, double x, double *slope) {
    const double sigmoid = 1 / (1 + exp(-x)), cdf = erfc(-x / sqrt(2)) / 2;
    const double y = sqrt(8 / acos(-1)) * (x + 0.044715 * x * x * x), gate = 1 / (1 + exp(-y));
    switch (kind) {
    case RT_GLU_SILU:
        *slope = sigmoid + x * sigmoid * (1 - sigmoid);
        return x * sigmoid;
    case RT_GLU_GELU:
        *slope = cdf + x * exp(-x * x / 2) / sqrt(2 * acos(-1));
        return x * cdf;
    case RT_GLU_GELU_TANH:
        *slope = gate + x * gate * (1 - gate) * sqrt(8 / acos(-1)) * (1 + 3 * 0.044715 * x * x);
        return x * gate;
    default:
        *slope = x > 0;
        return x > 0 ? x : 0;
    }
}

static void glu_reference(const rt_glu_params *p, bool backward, block *x) {
    for (int64_t row = 0; row < p->num_rows; row++)
        for (int64_t col = 0; col < p->num_cols; col++) {
            const int64_t gate_at = row * p->gate_stride + col, up_at = row * p->up_stride + col,
                          prod_at = row * p->prod_stride + col;
            double slope;
            const double up = load_element(p->dtype, x[UP].data, up_at);
            const double act = activation(p->kind, load_element(p->dtype, x[GATE].data, gate_at), &slope);
            const double dprod = load_element(p->dtype, x[PROD].data, prod_at);
            store_element(p->dtype, x[PROD].data, prod_at, act * up);
            if (!backward) continue;
            store_element(p->dtype, x[GATE].data, gate_at, dprod * up * slope);
            store_element(p->dtype, x[UP].data, up_at, dprod * act);
        }
}

// Each row of two numbers: rows, columns. Their product wrapped, or the reach of a stride did.
static const int64_t glu_corpus[][3] = {
    {INT64_MAX, INT64_MAX, INT64_MAX},
    {1LL << 32, 1LL << 32, 1LL << 32},
    {3, 5, 1LL << 62},
    {3, 5, INT64_MIN},
    {INT64_MAX, 1, 1},
    {1, INT64_MAX, INT64_MAX},
    {0, INT64_MAX, INT64_MAX},
    {1LL << 62, 0, 0},
};
enum { GLU_CORPUS = sizeof(glu_corpus) / sizeof(glu_corpus[0]) };

static void try_glu(uint64_t *state, int64_t entry) {
    const bool backward = random_int(state, 0, 1);
    verdict expected = VALID;
    rt_glu_params p = {all_dtypes[random_int(state, 0, 3)],
                       (rt_glu_kind)random_int(state, 0, 3),
                       random_int(state, 0, 9),
                       random_int(state, 0, 40),
                       0,
                       0,
                       0};
    if (random_int(state, 0, 9) == 0) p.num_cols = random_int(state, 500, 1100);
    int64_t *const fields[] = {&p.num_rows, &p.num_cols, &p.gate_stride, &p.up_stride, &p.prod_stride};
    for (int i = 2; i < 5; i++) *fields[i] = p.num_cols + random_int(state, 0, 1) * random_int(state, 0, 4);
    block x[NUM_GLU] = {0}, copies[NUM_GLU];
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 1, 3)};
    bool no_params = false;
    for (int64_t times = entry < 0 ? random_int(state, 0, 2) : 0; times > 0; times--) {
        expected = UNKNOWN;
        const int64_t kind = random_int(state, 0, 9), any = random_int(state, 0, 4);
        if (kind == 0) p.dtype = (rt_dtype)random_int(state, -1, 5);
        if (kind == 1) p.kind = (rt_glu_kind)random_int(state, -1, 5);
        if (kind == 2) x[random_int(state, 0, 2)].is_null = true;
        if (kind == 3) x[random_int(state, 0, 2)].is_skewed = true;
        if (kind == 4) parallel = random_workers(state);
        if (kind == 5) no_params = random_int(state, 0, 3) == 0;
        if (kind > 5) *fields[any] = hostile(state, *fields[any]);
    }
    if (entry >= 0) {
        expected = UNKNOWN;
        p.num_rows = glu_corpus[entry][0], p.num_cols = glu_corpus[entry][1];
        p.gate_stride = p.up_stride = p.prod_stride = glu_corpus[entry][2];
    }
    const int64_t bytes = (int64_t)dtype_bytes(p.dtype);
    for (int i = 0; i < NUM_GLU; i++) {
        x[i].element_bytes = bytes, x[i].ndim = 2;
        x[i].sizes[0] = p.num_rows, x[i].sizes[1] = p.num_cols;
        x[i].strides[0] = *fields[2 + i], x[i].strides[1] = 1;
        x[i].is_output = backward || i == PROD;
    }
    const bool forbidden = no_params || !is_dtype(p.dtype) || (int)p.kind < 0 || p.kind > RT_GLU_RELU;
    expected = judge_blocks(x, NUM_GLU, forbidden ? FORBIDDEN : expected);
    if (expected == IMPOSSIBLE) {
        num_skipped++;
        return;
    }
    const bool fair = random_int(state, 0, 9) > 0;
    make_blocks(x, copies, NUM_GLU, state);
    for (int i = 0; i < NUM_GLU && fair && !forbidden; i++) {
        fill_units(&x[i], p.dtype, state);
        memcpy(copies[i].memory, x[i].memory, x[i].num_bytes);
    }
    if (random_int(state, 0, 19) == 0 && expected != FORBIDDEN &&
        alias(x, backward ? random_int(state, 0, 2) : PROD, random_int(state, 0, 2)))
        expected = FORBIDDEN;
    const rt_glu_params *given = no_params ? NULL : &p;
    const rt_status status = backward ? rt_glu_bwd(given, x[GATE].data, x[UP].data, x[PROD].data, parallel)
                                      : rt_glu_fwd(given, x[GATE].data, x[UP].data, x[PROD].data, parallel);
    if (judge(backward ? "rt_glu_bwd" : "rt_glu_fwd", expected, status) && fair) {
        if (x[0].num_bytes > 0) glu_reference(&p, backward, copies);
        for (int i = 0; i < NUM_GLU; i++)
            compare("rt_glu", p.dtype, &x[i], &copies[i], 4 * unit_roundoff(p.dtype) + 1e-6);
    }
    free_blocks(x, copies, NUM_GLU);
}

// ---- cross entropy -----------------------------------------------------------------------------------------

static void loss_reference(const rt_cross_entropy_params *p, const int64_t *labels, block *x) {
    const rt_dtype sums = p->dtype == RT_F64 ? RT_F64 : RT_F32;
    for (int64_t t = 0; t < p->num_tokens; t++) {
        const bool ignored = labels[t] == p->ignore_index;
        double sum = 0, mean = 0, label_logit = 0;
        for (int64_t v = 0; v < p->vocab_size; v++) {
            double z = load_element(p->dtype, x[LOGITS].data, t * p->logits_stride + v);
            if (p->softcap > 0) z = p->softcap * tanh(z / p->softcap);
            sum += exp(z), mean += z / (double)p->vocab_size;
            if (v == labels[t]) label_logit = z;
        }
        const double lse = log(sum), smoothing = p->label_smoothing;
        const double loss = (1 - smoothing) * (lse - label_logit) + smoothing * (lse - mean) + p->z_loss * lse * lse;
        store_element(sums, x[LOSS].data, t, ignored ? 0 : loss);
        store_element(sums, x[LSE].data, t, ignored ? 0 : lse);
        for (int64_t v = 0; p->want_grad && v < p->vocab_size; v++) {
            const int64_t at = t * p->logits_stride + v;
            double z = load_element(p->dtype, x[LOGITS].data, at), slope = 1;
            if (p->softcap > 0) z = p->softcap * tanh(z / p->softcap), slope = 1 - z / p->softcap * (z / p->softcap);
            const double grad = exp(z - lse) * (1 + 2 * p->z_loss * lse) - (v == labels[t] ? 1 - smoothing : 0) -
                                smoothing / (double)p->vocab_size;
            store_element(p->dtype, x[LOGITS].data, at, ignored ? 0 : grad * slope);
        }
    }
}

static const int64_t loss_corpus[][3] = {
    // tokens, vocabulary, stride
    {INT64_MAX, INT64_MAX, INT64_MAX},
    {1LL << 32, 1LL << 32, 1LL << 32},
    {3, 7, 1LL << 62},
    {3, 7, INT64_MIN},
    {INT64_MAX, 1, 0},
    {1, INT64_MAX, 0},
    {0, INT64_MAX, INT64_MAX},
};
enum { LOSS_CORPUS = sizeof(loss_corpus) / sizeof(loss_corpus[0]) };

static void try_loss(uint64_t *state, int64_t entry) {
    verdict expected = VALID;
    rt_cross_entropy_params p = {.dtype = all_dtypes[random_int(state, 0, 3)],
                                 .num_tokens = random_int(state, 0, 6),
                                 .vocab_size = random_int(state, 1, random_int(state, 0, 9) ? 40 : 1100),
                                 .ignore_index = random_int(state, 0, 1) ? -100 : 0,
                                 .label_smoothing = random_int(state, 0, 1) ? 0 : 0.25,
                                 .softcap = random_int(state, 0, 1) ? 0 : 3,
                                 .z_loss = random_int(state, 0, 1) ? 0 : 0.125,
                                 .want_grad = random_int(state, 0, 1)};
    p.logits_stride = p.vocab_size + random_int(state, 0, 1) * random_int(state, 0, 4);
    int64_t *const fields[] = {&p.num_tokens, &p.vocab_size, &p.logits_stride, &p.ignore_index};
    double *const reals[] = {&p.label_smoothing, &p.softcap, &p.z_loss};
    block x[NUM_LOSS] = {0}, copies[NUM_LOSS];
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 1, 3)};
    bool no_params = false, spoil_label = false;
    for (int64_t times = entry < 0 ? random_int(state, 0, 2) : 0; times > 0; times--) {
        expected = UNKNOWN;
        const int64_t kind = random_int(state, 0, 11), any = random_int(state, 0, 3);
        if (kind == 0) p.dtype = (rt_dtype)random_int(state, -1, 5);
        if (kind == 1) *reals[random_int(state, 0, 2)] = hostile_real(state);
        if (kind == 2) x[random_int(state, 0, 3)].is_null = true;
        if (kind == 3) x[random_int(state, 0, 3)].is_skewed = true;
        if (kind == 4) parallel = random_workers(state);
        if (kind == 5) no_params = random_int(state, 0, 3) == 0;
        if (kind == 6) spoil_label = true;
        if (kind > 6) *fields[any] = hostile(state, *fields[any]);
    }
    if (entry >= 0) {
        expected = UNKNOWN;
        p.num_tokens = loss_corpus[entry][0], p.vocab_size = loss_corpus[entry][1];
        p.logits_stride = loss_corpus[entry][2];
    }
    for (int i = 0; i < NUM_LOSS; i++) {
        x[i].ndim = i == LOGITS ? 2 : 1;
        x[i].element_bytes = i == LABELS ? 8 : i == LOGITS ? (int64_t)dtype_bytes(p.dtype) : p.dtype == RT_F64 ? 8 : 4;
        x[i].sizes[0] = p.num_tokens, x[i].sizes[1] = p.vocab_size;
        x[i].strides[0] = i == LOGITS ? p.logits_stride : 1, x[i].strides[1] = 1;
        x[i].is_output = i == LOSS || i == LSE || (i == LOGITS && p.want_grad);
    }
    const bool numbers = p.label_smoothing >= 0 && p.label_smoothing <= 1 && is_softcap(p.dtype, p.softcap) &&
                         p.z_loss >= 0 && is_real(p.dtype, p.z_loss);
    const bool forbidden = no_params || !is_dtype(p.dtype) || p.vocab_size < 1 || !numbers;
    expected = judge_blocks(x, NUM_LOSS, forbidden ? FORBIDDEN : expected);
    if (expected == IMPOSSIBLE) {
        num_skipped++;
        return;
    }
    const bool fair = random_int(state, 0, 9) > 0;
    make_blocks(x, copies, NUM_LOSS, state);
    if (fair && !forbidden) fill_units(&x[LOGITS], p.dtype, state);
    memcpy(copies[LOGITS].memory, x[LOGITS].memory, x[LOGITS].num_bytes);
    int64_t *labels = (int64_t *)(void *)x[LABELS].memory;
    for (int64_t t = 0; t < (int64_t)x[LABELS].num_bytes / 8; t++) {
        labels[t] =
            p.vocab_size > 0 && random_int(state, 0, 3) ? random_int(state, 0, p.vocab_size - 1) : p.ignore_index;
        if (spoil_label && random_int(state, 0, 1)) labels[t] = hostile(state, labels[t]);
        const bool inside = labels[t] >= 0 && labels[t] < p.vocab_size;
        if (!inside && labels[t] != p.ignore_index) expected = FORBIDDEN;
    }
    if (random_int(state, 0, 19) == 0 && expected != FORBIDDEN &&
        alias(x, random_int(state, LOSS, LSE), random_int(state, 0, 3)))
        expected = FORBIDDEN;
    const rt_status status =
        rt_cross_entropy_fwd_bwd(no_params ? NULL : &p, x[LOGITS].data, (const int64_t *)(void *)x[LABELS].data,
                                 x[LOSS].data, x[LSE].data, parallel);
    const bool ordinary = fair && (p.softcap == 0 || p.softcap >= 1) && p.z_loss <= 2;
    if (judge("rt_cross_entropy_fwd_bwd", expected, status) && ordinary && x[LOGITS].num_bytes > 0) {
        const rt_dtype sums = p.dtype == RT_F64 ? RT_F64 : RT_F32;
        loss_reference(&p, labels, copies);
        compare("loss", sums, &x[LOSS], &copies[LOSS], 1e-5);
        compare("lse", sums, &x[LSE], &copies[LSE], 1e-5);
        compare("logits", p.dtype, &x[LOGITS], &copies[LOGITS], 4 * unit_roundoff(p.dtype) + 1e-5);
    }
    free_blocks(x, copies, NUM_LOSS);
}

// ---- multiply-add ------------------------------------------------------------------------------------------

static void try_multiply_add(uint64_t *state) {
    const int64_t good = random_int(state, 0, 20);
    int64_t iterations = random_int(state, 0, 2) ? good : hostile(state, good);
    if (iterations > 100000 && iterations <= 1LL << 32) iterations = 100000; // seconds
    rt_parallel parallel = random_workers(state);
    if (parallel.num_workers > 8) parallel.run = NULL; // as many rounds
    const rt_isa isa = (rt_isa)random_int(state, -1, 5);
    double flops = -1;
    const bool no_flops = random_int(state, 0, 9) == 0;
    const rt_status status = rt_multiply_add(isa, iterations, no_flops ? NULL : &flops, parallel);
    const bool forbidden =
        iterations < 0 || iterations > 1LL << 32 || no_flops || (int)isa < 0 || isa > RT_ISA_AVX512_BF16;
    if (judge("rt_multiply_add", forbidden ? FORBIDDEN : UNKNOWN, status) &&
        (flops < 0 || (flops == 0) != (iterations == 0)))
        wrong("rt_multiply_add", "gave a wrong number of flops");
}

// ---- dropout -----------------------------------------------------------------------------------------------

enum { X, PLACES, Y, NUM_DROPOUT };

static void dropout_reference(const rt_dropout_params *p, block *x) {
    const int64_t *places = (const int64_t *)(void *)x[PLACES].data;
    for (int64_t token = 0; token < p->num_tokens; token++)
        for (int64_t feature = 0; feature < p->num_features; feature++) {
            const rt_philox counter = {
                {(uint32_t)(feature / 4), (uint32_t)places[2 * token + 1], (uint32_t)places[2 * token], p->stream}};
            const uint32_t word = rt_philox4x32(counter, p->seed, p->step).word[feature % 4];
            const double kept = 1 - p->probability;
            const double value = load_element(p->dtype, x[X].data, token * p->x_stride + feature);
            store_element(p->dtype, x[Y].data, token * p->num_features + feature,
                          word < nearbyint(kept * 0x1p32) ? value / kept : 0);
        }
}

static void try_dropout(uint64_t *state) {
    verdict expected = VALID;
    rt_dropout_params p = {.dtype = all_dtypes[random_int(state, 0, 3)],
                           .num_tokens = random_int(state, 0, 6),
                           .num_features = random_int(state, 0, random_int(state, 0, 9) ? 40 : 1100),
                           .probability = (double)random_int(state, 0, 4) / 4,
                           .seed = (uint32_t)random_bits(state),
                           .step = (uint32_t)random_bits(state),
                           .stream = (uint32_t)random_bits(state)};
    p.x_stride = p.num_features + random_int(state, 0, 1) * random_int(state, 0, 4);
    int64_t *const fields[] = {&p.num_tokens, &p.num_features, &p.x_stride};
    block x[NUM_DROPOUT] = {0}, copies[NUM_DROPOUT];
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 1, 3)};
    bool no_params = false;
    for (int64_t times = random_int(state, 0, 2); times > 0; times--) {
        expected = UNKNOWN;
        const int64_t kind = random_int(state, 0, 9), any = random_int(state, 0, 2);
        if (kind == 0) p.dtype = (rt_dtype)random_int(state, -1, 5);
        if (kind == 1) p.probability = hostile_real(state);
        if (kind == 2) x[any].is_null = true;
        if (kind == 3) x[any].is_skewed = true;
        if (kind == 4) parallel = random_workers(state);
        if (kind == 5) no_params = random_int(state, 0, 3) == 0;
        if (kind > 5) *fields[any] = hostile(state, *fields[any]);
    }
    for (int i = 0; i < NUM_DROPOUT; i++) {
        x[i].element_bytes = i == PLACES ? 8 : (int64_t)dtype_bytes(p.dtype), x[i].ndim = 2;
        x[i].sizes[0] = p.num_tokens, x[i].sizes[1] = i == PLACES ? 2 : p.num_features;
        x[i].strides[0] = i == X ? p.x_stride : x[i].sizes[1], x[i].strides[1] = 1;
        x[i].is_output = i == Y;
    }
    const bool forbidden = no_params || !is_dtype(p.dtype) || !(p.probability >= 0 && p.probability <= 1) ||
                           p.num_features > INT64_C(4) << 32;
    expected = judge_blocks(x, NUM_DROPOUT, forbidden ? FORBIDDEN : expected);
    if (expected == IMPOSSIBLE) {
        num_skipped++;
        return;
    }
    make_blocks(x, copies, NUM_DROPOUT, state);
    if (!forbidden) fill_units(&x[X], p.dtype, state);
    memcpy(copies[X].memory, x[X].memory, x[X].num_bytes);
    if (random_int(state, 0, 19) == 0 && expected != FORBIDDEN && alias(x, Y, random_int(state, X, PLACES)))
        expected = FORBIDDEN;
    const rt_status status =
        rt_dropout(no_params ? NULL : &p, x[X].data, (const int64_t *)(void *)x[PLACES].data, x[Y].data, parallel);
    if (judge("rt_dropout", expected, status) && x[Y].num_bytes > 0) {
        dropout_reference(&p, copies);
        compare("rt_dropout", p.dtype, &x[Y], &copies[Y], 4 * unit_roundoff(p.dtype) + 1e-6);
    }
    free_blocks(x, copies, NUM_DROPOUT);
}

static void trial(uint64_t *state, int64_t entry) {
    if (entry >= GLU_CORPUS)
        try_loss(state, entry - GLU_CORPUS);
    else if (entry >= 0)
        try_glu(state, entry);
    else if (trial_number % 64 == 0)
        try_multiply_add(state);
    else if (trial_number % 3 == 0)
        try_dropout(state);
    else if (trial_number % 2)
        try_glu(state, -1);
    else
        try_loss(state, -1);
}

int main(int argc, char **argv) { return fuzz_main(argc, argv, 6000, GLU_CORPUS + LOSS_CORPUS, trial); }
