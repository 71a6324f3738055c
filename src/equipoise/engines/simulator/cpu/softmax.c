/* Local SGD of softmax regression, one client after the other: everything that a client touches stays in a core's own cache.

   A step of a client with weights W (F, C) and a batch x (n, F) is: gather and scale the batch, outputs z = x W + bias, deltas
   d = -lr/n (softmax(z) - one-hot), W += x' d. The two products hold a tile of rows x classes in registers and go through all
   features; both then run at the rate of large matrix products, which a library does not reach for ten rows.

   Memory: classes are padded with zeros to whole vectors, features to whole panels. A model is one tile of up to two vectors of
   classes after the other, in each tile one line per feature and last the bias. A batch is one panel of features after the other,
   in each panel one line per example. `pack` and `unpack` go between these models and vectors.

   Threads take groups of clients, each with a total of its own, so that sums do not depend on who was faster.

   The same outputs give losses and errors of clients' examples at given models. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#define MOST_ROWS 12 /* two accumulators each, two vectors of weights and a factor: 27 of 32 registers */
#elif defined(__AVX__)
#define LANES 8
#define MOST_ROWS 6
#else
#define LANES 4
#define MOST_ROWS 12
#endif
#define TILE (2 * LANES)
#define PANEL 16
#define BLOCK 48 /* examples that are scored together */
#define MOST_THREADS 256
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

typedef struct { /* as in softmax.py */
  const void *x;    /* (N, F): bytes or floats */
  const int64_t *y; /* (N) */
  int64_t features, classes, bytes, has_bias;
  int64_t dimension, weight, bias; /* of a model as a vector, and where in it the parameters begin */
  float scale, shift; /* of x */
} Data;

typedef struct { /* as in softmax.py */
  Data data;
  int64_t clients, batch_size, longest, epochs, groups;
  const int64_t *first;  /* (K) row of each client's first example */
  const int64_t *sizes;  /* (K) */
  const int64_t *steps;  /* (K) */
  const int64_t *orders; /* (K, epochs, longest): which example comes when, counted within the client */
  const float *starts;   /* models */
  const int64_t *owners; /* (K) which of them each client starts from */
  const float *anchors;  /* models, or none */
  const int64_t *towards; /* (K) which of them pulls each client */
  const float *pulls;    /* (K) by how much of the way, at every step */
  const float *weights;  /* (K) in the group's total */
  const int64_t *turns;  /* (K) the clients in the order in which they are trained */
  const int64_t *edges;  /* (groups + 1) in that order */
  float *totals;         /* (groups) models */
  double *squares;       /* (K) squared length of each update */
  double *losses;        /* (K) summed batch losses */
  float *memory;         /* (threads, memory_each) */
  int64_t memory_each;
  float lr, keep, clip; /* an update that is longer than `clip` counts with that length */
  int64_t next; /* group that nobody has taken yet */
} Work;

typedef struct { /* as in softmax.py */
  Data data;
  int64_t clients, models;
  const int64_t *first;  /* (K) */
  const int64_t *sizes;  /* (K) */
  const float *weights;  /* models */
  double *losses;        /* (models, K): means over each client's examples */
  double *errors;        /* (models, K): shares whose largest output is another class */
  float *memory;         /* (threads, memory_each) */
  int64_t memory_each;
  int64_t next; /* client that nobody has taken yet */
} Scores;

typedef struct {
  void *work;
  float *memory;
} Helper;

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE vec every(float value) { return value - (vec){0}; }
INLINE vec choose(ivec where, vec a, vec b) { return (vec)(((ivec)a & where) | ((ivec)b & ~where)); }

/* e^x for x <= 0 to the last bit or two: x = n ln 2 + r, the series of e^r, and n in the exponent. Not-a-numbers stay what they are;
   below -87 the result is 1e-38. */
INLINE vec exponential(vec x) {
  const vec least = every(-87.33654f), to_integer = every(12582912.f);
  x = choose(x < least, least, x);
  vec shifted = x * 1.44269504f + to_integer, n = shifted - to_integer;
  vec r = x - n * 0.693145751953125f;
  r -= n * 1.428606765330187e-6f;
  vec p = every(1.f / 720);
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  return p * (vec)(((ivec)shifted << 23) + (127 << 23));
}

/* Outputs of r examples for one tile of `vectors` x LANES classes; `panel` is how far apart two panels of the batch are. */
INLINE void outputs(const int r, const int vectors, const Data *k, const float *w, const float *x, int64_t panel, float *z,
                    int64_t columns) {
  const int64_t panels = (k->features + PANEL - 1) / PANEL;
  vec sum[MOST_ROWS][2];
  for (int i = 0; i < r; i++)
    for (int v = 0; v < vectors; v++) sum[i][v] = load(w + (panels * PANEL * vectors + v) * LANES); /* the bias */
  for (int64_t p = 0; p < panels; p++, x += panel)
    for (int j = 0; j < PANEL; j++, w += vectors * LANES) {
      vec w0 = load(w), w1 = vectors > 1 ? load(w + LANES) : w0;
      for (int i = 0; i < r; i++) {
        float factor = x[i * PANEL + j];
        sum[i][0] += factor * w0;
        if (vectors > 1) sum[i][1] += factor * w1;
      }
    }
  for (int i = 0; i < r; i++)
    for (int v = 0; v < vectors; v++) store(z + i * columns + v * LANES, sum[i][v]);
}

/* The weights of a tile after a step: keep (w + pull (anchor - w)) + x' d. */
INLINE void change(const int r, const int vectors, const Data *k, const float *from, float *to, const float *x, int64_t panel,
                   const float *d, int64_t columns, float keep, const float *anchor, float pull) {
  const int64_t panels = (k->features + PANEL - 1) / PANEL;
  vec delta[MOST_ROWS][2];
  for (int i = 0; i < r; i++)
    for (int v = 0; v < vectors; v++) delta[i][v] = load(d + i * columns + v * LANES);
  for (int64_t p = 0; p < panels; p++, x += panel)
    for (int j = 0; j < PANEL; j++) {
      vec w0 = load(from), w1 = vectors > 1 ? load(from + LANES) : w0;
      if (anchor) {
        w0 += pull * (load(anchor) - w0);
        if (vectors > 1) w1 += pull * (load(anchor + LANES) - w1);
        anchor += vectors * LANES;
      }
      w0 *= keep, w1 *= keep;
      for (int i = 0; i < r; i++) {
        float factor = x[i * PANEL + j];
        w0 += factor * delta[i][0];
        if (vectors > 1) w1 += factor * delta[i][1];
      }
      store(to, w0);
      if (vectors > 1) store(to + LANES, w1);
      from += vectors * LANES, to += vectors * LANES;
    }
  for (int v = 0; v < vectors; v++) {
    vec bias = load(from + v * LANES);
    if (anchor) bias += pull * (load(anchor + v * LANES) - bias);
    bias *= keep;
    for (int i = 0; k->has_bias && i < r; i++) bias += delta[i][v];
    store(to + v * LANES, bias);
  }
}

/* The number of rows must be a constant where they are held in registers: one copy of the code for each. */
#define WITH(n, CALL) \
  case n: { \
    enum { ROWS = n }; \
    CALL; \
  } break;
#define UP_TO_6(CALL) WITH(1, CALL) WITH(2, CALL) WITH(3, CALL) WITH(4, CALL) WITH(5, CALL) WITH(6, CALL)
#if MOST_ROWS == 6
#define UP_TO_MOST(CALL) UP_TO_6(CALL)
#else
#define UP_TO_MOST(CALL) \
  UP_TO_6(CALL) WITH(7, CALL) WITH(8, CALL) WITH(9, CALL) WITH(10, CALL) WITH(11, CALL) WITH(12, CALL)
#endif

static void tile_outputs(int r, int vectors, const Data *k, const float *w, const float *x, int64_t panel, float *z,
                         int64_t columns) {
  if (vectors == 2)
    switch (r) { UP_TO_MOST(outputs(ROWS, 2, k, w, x, panel, z, columns)) }
  else
    switch (r) { UP_TO_MOST(outputs(ROWS, 1, k, w, x, panel, z, columns)) }
}

static void tile_change(int r, int vectors, const Data *k, const float *from, float *to, const float *x, int64_t panel,
                        const float *d, int64_t columns, float keep, const float *anchor, float pull) {
  if (vectors == 2)
    switch (r) { UP_TO_MOST(change(ROWS, 2, k, from, to, x, panel, d, columns, keep, anchor, pull)) }
  else
    switch (r) { UP_TO_MOST(change(ROWS, 1, k, from, to, x, panel, d, columns, keep, anchor, pull)) }
}

/* The examples of a batch in panels, scaled. Meanwhile those of the next one are asked for. */
#define GATHER(TYPE) \
  for (int64_t i = 0; i < n; i++) { \
    const TYPE *in = (const TYPE *)k->x + (first + order[i]) * features; \
    float *out = x + i * PANEL; \
    if (i < soon) { \
      const char *next = (const char *)((const TYPE *)k->x + (first + order[n + i]) * features); \
      for (int64_t byte = 0; byte < features * (int64_t)sizeof(TYPE); byte += 64) __builtin_prefetch(next + byte, 0, 2); \
    } \
    int64_t f = 0; \
    for (; f + PANEL <= features; f += PANEL, out += n * PANEL) \
      for (int j = 0; j < PANEL; j++) out[j] = in[f + j] * scale + shift; \
    if (f < features) \
      for (int j = 0; j < PANEL; j++) out[j] = f + j < features ? in[f + j] * scale + shift : 0; \
  }

static void gather(const Data *k, int64_t first, const int64_t *order, int64_t n, int64_t soon, float *restrict x) {
  const int64_t features = k->features;
  const float scale = k->scale, shift = k->shift;
  if (k->bytes)
    GATHER(uint8_t)
  else
    GATHER(float)
}

/* The largest of the outputs of an example; padding becomes -infinity. */
INLINE float largest_output(float *z, int64_t classes, int64_t columns) {
  for (int64_t c = classes; c < columns; c++) z[c] = -INFINITY;
  vec largest = load(z);
  for (int64_t c = LANES; c < columns; c += LANES) largest = choose(largest > load(z + c), largest, load(z + c));
  float most = largest[0];
  for (int j = 1; j < LANES; j++) most = largest[j] > most ? largest[j] : most;
  return most;
}

/* Outputs of an example become e^(output - most), and 0 for padding; gives their sum. */
INLINE float exponentials(float *z, float most, int64_t classes, int64_t columns) {
  vec sums = every(0);
  for (int64_t c = 0; c < columns; c += LANES) {
    vec e = exponential(load(z + c) - most);
    store(z + c, e);
    sums += e;
  }
  for (int64_t c = classes; c < columns; c++) sums[c % LANES] -= z[c], z[c] = 0;
  float sum = 0;
  for (int j = 0; j < LANES; j++) sum += sums[j];
  return sum;
}

/* Outputs (n, columns) become deltas; gives the mean loss. */
static double deltas(const Data *k, float lr, int64_t first, const int64_t *order, int64_t n, float *z, int64_t columns) {
  const float rate = lr / n;
  double loss = 0;
  for (int64_t i = 0; i < n; i++, z += columns) {
    const int64_t y = k->y[first + order[i]];
    const float most = largest_output(z, k->classes, columns), target = z[y] - most;
    const float sum = exponentials(z, most, k->classes, columns);
    loss += log((double)sum) - target;
    for (int64_t c = 0; c < columns; c += LANES) store(z + c, load(z + c) * (-rate / sum));
    z[y] += rate;
  }
  return loss / n;
}

/* Outputs (n, columns) of a batch x. */
static void batch_outputs(const Data *k, const float *w, const float *x, int64_t n, float *z, int64_t columns) {
  const int64_t lines = (k->features + PANEL - 1) / PANEL * PANEL + 1, parts = (n + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t c = 0; c < columns; c += TILE) {
    const int vectors = columns - c >= TILE ? 2 : 1;
    for (int64_t part = 0; part < parts; part++) {
      const int64_t i = n * part / parts, r = n * (part + 1) / parts - i;
      tile_outputs(r, vectors, k, w + c * lines, x + i * PANEL, n * PANEL, z + i * columns + c, columns);
    }
  }
}

/* Numbers of a packed model. */
static int64_t numbers_of(const Data *k) {
  return ((k->features + PANEL - 1) / PANEL * PANEL + 1) * ((k->classes + LANES - 1) / LANES * LANES);
}

/* The squared length of the difference of two packed models. */
static double squared_length(const float *a, const float *b, int64_t numbers) {
  double square = 0;
  for (int64_t c = 0; c < numbers; c += 64 * LANES) { /* in float for so long that sums stay as good as their terms */
    const int64_t end = c + 64 * LANES < numbers ? c + 64 * LANES : numbers;
    vec sum = every(0);
    for (int64_t i = c; i < end; i += LANES) {
      vec d = load(a + i) - load(b + i);
      sum += d * d;
    }
    for (int j = 0; j < LANES; j++) square += sum[j];
  }
  return square;
}

/* All steps of a client, and its part of the group's total. */
static void train(Work *k, int64_t client, float *memory, float *total, int first_of_group) {
  const Data *data = &k->data;
  const int64_t panels = (data->features + PANEL - 1) / PANEL, lines = panels * PANEL + 1;
  const int64_t columns = (data->classes + LANES - 1) / LANES * LANES, numbers = lines * columns;
  const int64_t size = k->sizes[client], first = k->first[client];
  const int64_t width = k->batch_size < size ? k->batch_size : size, per_epoch = (size + width - 1) / width;
  float *own = memory, *x = own + numbers, *z = x + panels * PANEL * width;
  const float *start = k->starts + k->owners[client] * numbers, *from = start;
  const float *anchor = k->anchors ? k->anchors + k->towards[client] * numbers : 0;
  const float pull = k->anchors ? k->pulls[client] : 0;
  double loss = 0, square = 0;
  for (int64_t step = 0; step < k->steps[client]; step++) {
    const int64_t epoch = per_epoch > 1 ? step / per_epoch : 0, place = step % per_epoch * width;
    const int64_t *order = k->orders + (client * k->epochs + epoch) * k->longest + place;
    const int64_t n = size - place < width ? size - place : width, after = size - place - n;
    const int64_t parts = (n + MOST_ROWS - 1) / MOST_ROWS;
    gather(data, first, order, n, after < n ? after : n, x);
    batch_outputs(data, from, x, n, z, columns);
    loss += deltas(data, k->lr, first, order, n, z, columns);
    for (int64_t c = 0; c < columns; c += TILE) {
      const int vectors = columns - c >= TILE ? 2 : 1;
      for (int64_t part = 0; part < parts; part++) {
        const int64_t i = n * part / parts, r = n * (part + 1) / parts - i;
        const float *held = (part ? own : from) + c * lines, *towards = anchor && !part ? anchor + c * lines : 0;
        tile_change(r, vectors, data, held, own + c * lines, x + i * PANEL, n * PANEL, z + i * columns + c, columns,
                    part ? 1.f : k->keep, towards, pull);
      }
    }
    from = own;
  }
  float weight = k->weights[client];
  if (k->clip < INFINITY) {
    const double length = sqrt(squared_length(from, start, numbers));
    if (length > k->clip) weight *= k->clip / length;
  }
  for (int64_t c = 0; c < numbers; c += lines * LANES) { /* numbers = lines x columns, and columns are whole vectors */
    vec sum = every(0);
    for (int64_t i = c; i < c + lines * LANES; i += LANES) {
      vec d = load(from + i) - load(start + i);
      sum += d * d;
      store(total + i, first_of_group ? d * weight : load(total + i) + d * weight);
    }
    for (int j = 0; j < LANES; j++) square += sum[j];
  }
  k->losses[client] = loss, k->squares[client] = square;
}

/* Mean loss and share of errors of a client's examples at each of the models. */
static void score(Scores *k, int64_t client, float *memory) {
  const Data *data = &k->data;
  const int64_t panels = (data->features + PANEL - 1) / PANEL, lines = panels * PANEL + 1;
  const int64_t columns = (data->classes + LANES - 1) / LANES * LANES, size = k->sizes[client];
  float *x = memory, *z = x + panels * PANEL * BLOCK;
  int64_t order[BLOCK];
  for (int64_t i = 0; i < BLOCK; i++) order[i] = i;
  for (int64_t m = 0; m < k->models; m++) k->losses[m * k->clients + client] = k->errors[m * k->clients + client] = 0;
  for (int64_t begin = 0; begin < size; begin += BLOCK) {
    const int64_t n = size - begin < BLOCK ? size - begin : BLOCK, first = k->first[client] + begin;
    gather(data, first, order, n, 0, x);
    for (int64_t m = 0; m < k->models; m++) {
      double loss = 0, errors = 0;
      batch_outputs(data, k->weights + m * lines * columns, x, n, z, columns);
      for (int64_t i = 0; i < n; i++) {
        float *row = z + i * columns;
        const int64_t y = data->y[first + i];
        const float most = largest_output(row, data->classes, columns), target = row[y] - most;
        int64_t found = 0;
        while (found < data->classes - 1 && row[found] != most) found++; /* the first of the largest */
        errors += found != y;
        loss += log((double)exponentials(row, most, data->classes, columns)) - target;
      }
      k->losses[m * k->clients + client] += loss / size, k->errors[m * k->clients + client] += errors / size;
    }
  }
}

static void *work_on(void *argument) {
  Helper *helper = argument;
  Work *k = helper->work;
  const int64_t numbers = numbers_of(&k->data);
  for (;;) {
    const int64_t group = __atomic_fetch_add(&k->next, 1, __ATOMIC_RELAXED);
    if (group >= k->groups) return 0;
    for (int64_t turn = k->edges[group]; turn < k->edges[group + 1]; turn++)
      train(k, k->turns[turn], helper->memory, k->totals + group * numbers, turn == k->edges[group]);
  }
}

static void *score_on(void *argument) {
  Helper *helper = argument;
  Scores *k = helper->work;
  for (;;) {
    const int64_t client = __atomic_fetch_add(&k->next, 1, __ATOMIC_RELAXED);
    if (client >= k->clients) return 0;
    score(k, client, helper->memory);
  }
}

/* Weights (C, F) of one tile, of which `real` classes are no padding, into their lines. */
static void pack_tile(const Data *k, const float *weight, const float *bias, float *tile, int width, int real) {
  const int64_t features = k->features, lines = (features + PANEL - 1) / PANEL * PANEL + 1;
  for (int64_t f = 0; f < lines - 1; f += PANEL)
    for (int c = 0; c < width; c++)
      for (int64_t i = f; i < f + PANEL; i++) tile[i * width + c] = c < real && i < features ? weight[c * features + i] : 0;
  for (int c = 0; c < width; c++) tile[(lines - 1) * width + c] = c < real && bias ? bias[c] : 0;
}

/* The reverse, of the sum of the tiles of some models, which are `apart`. */
static void unpack_tile(const Data *k, const float *tile, int64_t apart, const int64_t *which, int64_t count, float *weight,
                        float *bias, int width, int real) {
  const int64_t features = k->features, lines = (features + PANEL - 1) / PANEL * PANEL + 1;
  _Alignas(64) float sums[PANEL * TILE];
  for (int64_t f = 0; f < lines; f += PANEL) {
    const int rows = f + 1 < lines ? PANEL : 1; /* the last line is the bias */
    for (int j = 0; j < rows * width; j += LANES) {
      const float *from = tile + f * width + j;
      vec sum = count ? load(from + which[0] * apart) : every(0);
      for (int64_t i = 1; i < count; i++) sum += load(from + which[i] * apart);
      store(sums + j, sum);
    }
    if (rows == 1)
      for (int c = 0; bias && c < real; c++) bias[c] = sums[c];
    else
      for (int c = 0; c < real; c++)
        for (int64_t i = f; i < f + PANEL && i < features; i++) weight[c * features + i] = sums[(i - f) * width + c];
  }
}

/* Models (count, D), packed. */
void pack(const Data *k, const float *models, int64_t count, float *packed) {
  const int64_t columns = (k->classes + LANES - 1) / LANES * LANES, numbers = numbers_of(k);
  for (int64_t i = 0; i < count; i++, models += k->dimension, packed += numbers)
    for (int64_t c = 0; c < columns; c += TILE) {
      const int width = columns - c < TILE ? LANES : TILE, real = k->classes - c < width ? k->classes - c : width;
      pack_tile(k, models + k->weight + c * k->features, k->has_bias ? models + k->bias + c : 0, packed + c * (numbers / columns),
                width, real);
    }
}

/* Models (count, D), each the sum of some packed ones: those that `which` has between two of the edges (count + 1). */
void unpack(const Data *k, const float *packed, const int64_t *which, const int64_t *edges, int64_t count, float *models) {
  const int64_t columns = (k->classes + LANES - 1) / LANES * LANES, numbers = numbers_of(k);
  for (int64_t i = 0; i < count; i++, models += k->dimension)
    for (int64_t c = 0; c < columns; c += TILE) {
      const int width = columns - c < TILE ? LANES : TILE, real = k->classes - c < width ? k->classes - c : width;
      unpack_tile(k, packed + c * (numbers / columns), numbers, which + edges[i], edges[i + 1] - edges[i],
                  models + k->weight + c * k->features, k->has_bias ? models + k->bias + c : 0, width, real);
    }
}

/* The work of `threads` threads, or of as many as the system allows. */
static void with_threads(void *(*serve)(void *), void *work, float *memory, int64_t memory_each, int threads) {
  pthread_t others[MOST_THREADS];
  Helper helpers[MOST_THREADS];
  int started = 0;
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  for (int i = 0; i < threads; i++) helpers[i] = (Helper){work, memory + i * memory_each};
  for (int i = 1; i < threads; i++)
    if (pthread_create(&others[started], 0, serve, &helpers[i]) == 0) started++;
  serve(&helpers[0]);
  for (int i = 0; i < started; i++) pthread_join(others[i], 0);
}

int lanes(void) { return LANES; }

int block(void) { return BLOCK; }

int size_of_work(void) { return sizeof(Work); }

int size_of_scores(void) { return sizeof(Scores); }

void run_work(Work *k, int threads) {
  k->next = 0;
  with_threads(work_on, k, k->memory, k->memory_each, threads);
}

void run_scores(Scores *k, int threads) {
  k->next = 0;
  with_threads(score_on, k, k->memory, k->memory_each, threads);
}
