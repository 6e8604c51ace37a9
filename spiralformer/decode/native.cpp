// A decode step on a CPU, bound by reading the weights once. Float32 sums, whatever the weights' type.
//
// Shapes: P rows (of one or more groups), D width, H heads, K head size, C capacity, M memory slots.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <omp.h>
#include <torch/library.h>

using Vec = at::vec::Vectorized<float>;

typedef float vec __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(32)));
typedef uint16_t halves __attribute__((vector_size(16)));

static const int64_t AHEAD = 32768;  // bytes that are asked for before they are needed
static const int64_t NEAR = 512;  // weights asked for ahead where one output is read at a time

// ---------------------------------------------------------------------------- vectors

static inline vec load(const float* p) {
  vec v;
  __builtin_memcpy(&v, p, 32);
  return v;
}

static inline vec load(const at::BFloat16* p) {
  halves h;
  __builtin_memcpy(&h, p, 16);
  words w = __builtin_convertvector(h, words) << 16;
  vec v;
  __builtin_memcpy(&v, &w, 32);
  return v;
}

static inline void store(float* p, vec v) { __builtin_memcpy(p, &v, 32); }

static inline float sum(vec v) {
  vec4 a, b;
  __builtin_memcpy(&a, &v, 16);
  __builtin_memcpy(&b, (const char*)&v + 16, 16);
  a += b;
  return (a[0] + a[2]) + (a[1] + a[3]);
}

template <typename A, typename B>
static float dot(const A* a, const B* b, int64_t n) {
  vec acc = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) acc += load(a + i) * load(b + i);
  float s = sum(acc);
  for (; i < n; i++) s += float(a[i]) * float(b[i]);
  return s;
}

// y += c·x
template <typename T>
static void add(float* y, float c, const T* x, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store(y + i, load(y + i) + c * load(x + i));
  for (; i < n; i++) y[i] += c * float(x[i]);
}

static void softmax(float* x, int64_t n) {
  const float peak = *std::max_element(x, x + n);
  for (int64_t i = 0; i < n; i += Vec::size()) {
    const int64_t count = std::min<int64_t>(Vec::size(), n - i);
    (Vec::loadu(x + i, count) - Vec(peak)).exp().store(x + i, count);
  }
  float total = 0;
  for (int64_t i = 0; i < n; i++) total += x[i];
  for (int64_t i = 0; i < n; i++) x[i] /= total;
}

static void gelu(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += Vec::size()) {
    const int64_t count = std::min<int64_t>(Vec::size(), n - i);
    const Vec v = Vec::loadu(x + i, count);
    (v * Vec(0.5f) * (Vec(1.f) + (v * Vec(float(M_SQRT1_2))).erf())).store(x + i, count);
  }
}

// ---------------------------------------------------------------------------- threads

struct Range {
  int64_t from, to;
};

// Every thread of a call and its place among them. Between two calls of `wait`, a thread writes only
// its own share of what the others read.
struct Team {
  int64_t index, size;

  // In units, so that a sum is the same however many threads there are.
  Range share(int64_t n, int64_t unit = 16) const {
    const int64_t units = (n + unit - 1) / unit;
    return {
        std::min(n, units * index / size * unit), std::min(n, units * (index + 1) / size * unit)};
  }
  void wait() const {
#pragma omp barrier
  }
};

template <typename F>
static void together(int64_t weights, const F& f) {
  const int most = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int threads = std::max<int64_t>(1, std::min<int64_t>(most, weights / 32768));
#pragma omp parallel num_threads(threads) if (threads > 1)
  f(Team{omp_get_thread_num(), omp_get_num_threads()});
}

// ---------------------------------------------------------------------------- linear layers

static const int64_t BLOCK = 32;  // weights taken at a time: one or two lines of cache

// Sixteen weights as two vectors. Two bfloat16 share a word, so a shift and a mask give the even
// and the odd ones; `arrange` puts x into the same order.
static inline void pair(const float* p, vec& a, vec& b) {
  a = load(p);
  b = load(p + 8);
}

static inline void pair(const at::BFloat16* p, vec& a, vec& b) {
  words w;
  __builtin_memcpy(&w, p, 32);
  words even = w << 16, odd = w & 0xffff0000u;
  __builtin_memcpy(&a, &even, 32);
  __builtin_memcpy(&b, &odd, 32);
}

// x (rows, K) in that order: itself, or a copy in `mine`.
template <typename T>
static const float* arrange(const float* x, int64_t rows, int64_t K, float* mine) {
  if (std::is_same<T, float>::value) return x;
  const int64_t whole = K / BLOCK * BLOCK;
  for (int64_t m = 0; m < rows; m++, x += K, mine += K) {
    for (int64_t k = 0; k < whole; k += 16)
      for (int i = 0; i < 8; i++) {
        mine[k + i] = x[k + 2 * i];
        mine[k + 8 + i] = x[k + 2 * i + 1];
      }
    std::copy(x + whole, x + K, mine + whole);
  }
  return mine - rows * K;
}

// A linear layer, as it lies in memory.
template <typename T>
struct Linear {
  const T* w = nullptr;  // N K
  const T* bias = nullptr;  // N, or none
  int64_t N = 0, K = 0;

  Linear() = default;
  Linear(const at::Tensor& weight, const std::optional<at::Tensor>& b)
      : w(weight.const_data_ptr<T>()),
        bias(b ? b->const_data_ptr<T>() : nullptr),
        N(weight.size(0)),
        K(weight.size(1)) {}
};

// Outputs n … n+R-1 of M rows, added to y or written there: a row of w is used for all of them while
// it is in registers. Each has U partial sums, so that one addition does not wait for the other.
template <typename T, int M, int R, int U>
static void outputs(
    const float* x, const Linear<T>& layer, float* y, bool added, int64_t n, const T* ahead) {
  const int64_t K = layer.K, N = layer.N;
  const T* w = layer.w;
  vec acc[R][M][U] = {};
  const int64_t whole = K / BLOCK * BLOCK;
  for (int64_t k = 0; k < whole; k += BLOCK)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const T* p = w + (n + r) * K + k;
#pragma GCC unroll 2
      for (int64_t line = 0; line < BLOCK; line += 64 / sizeof(T))
        __builtin_prefetch(ahead + r * K + k + line);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        vec a, b;
        pair(p + 16 * half, a, b);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          acc[r][m][2 * half % U] += a * load(x + m * K + k + 16 * half);
          acc[r][m][(2 * half + 1) % U] += b * load(x + m * K + k + 16 * half + 8);
        }
      }
    }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) {
      vec all = acc[r][m][0];
      for (int u = 1; u < U; u++) all += acc[r][m][u];
      float s = sum(all);
      for (int64_t k = whole; k < K; k++) s += float(w[(n + r) * K + k]) * x[m * K + k];
      float& to = y[m * N + n + r];
      to = s + (layer.bias ? float(layer.bias[n + r]) : 0.f) + (added ? to : 0.f);
    }
}

// A thread's outputs of all rows. Its part of w ends before `next` begins, which is what it reads
// afterwards: it goes on to ask for its part there.
template <typename T, int R, int U>
static void share_of_product(
    const float* x, int64_t rows, const Linear<T>& layer, float* y, bool added,
    const Linear<T>& next, const Team& team) {
  const int64_t K = layer.K, far = AHEAD / int64_t(sizeof(T)), near = R == 1 ? NEAR : far;
  const auto [from, to] = team.share(layer.N);
  const T* then = next.w ? next.w + team.share(next.N).from * next.K : layer.w;
  auto all_rows = [&](auto count, int64_t n, const T* ahead) {
    constexpr int C = decltype(count)::value;
    for (int64_t m = 0; m < rows; m += 4) {
      const float* px = x + m * K;
      float* py = y + m * layer.N;
      switch (rows - m) {
        case 1: outputs<T, 1, C, U>(px, layer, py, added, n, ahead); break;
        case 2: outputs<T, 2, C, U>(px, layer, py, added, n, ahead); break;
        case 3: outputs<T, 3, C, U>(px, layer, py, added, n, ahead); break;
        default: outputs<T, 4, C, U>(px, layer, py, added, n, ahead);
      }
    }
  };
  int64_t n = from;
  for (; n + R <= to; n += R) {
    const int64_t beyond = (n - to) * K + far;
    all_rows(std::integral_constant<int, R>(), n, beyond < 0 ? layer.w + n * K + near : then + beyond);
  }
  for (; n < to; n++) all_rows(std::integral_constant<int, 1>(), n, layer.w + n * K);
}

template <typename T>
static void product(
    const float* x, int64_t rows, const Linear<T>& layer, float* y, bool added,
    const Linear<T>& next, const Team& team) {
  if (rows > 2)  // R·M·U sums in registers
    share_of_product<T, 2, 1>(x, rows, layer, y, added, next, team);
  else if (sizeof(T) == 2)
    share_of_product<T, 1, 2>(x, rows, layer, y, added, next, team);
  else
    share_of_product<T, 4, 1>(x, rows, layer, y, added, next, team);
}

// Runs f<float> or f<BFloat16> by the type of the weights.
#define BY_TYPE(weight, ...)                                                            \
  [&] {                                                                                 \
    TORCH_CHECK((weight).is_contiguous(), "spiralformer: weights must be contiguous");  \
    if ((weight).scalar_type() == at::kFloat) {                                         \
      using T = float;                                                                  \
      return __VA_ARGS__();                                                             \
    }                                                                                   \
    TORCH_CHECK(                                                                        \
        (weight).scalar_type() == at::kBFloat16,                                        \
        "spiralformer: weights must be float32 or bfloat16, not ", (weight).scalar_type()); \
    using T = at::BFloat16;                                                             \
    return __VA_ARGS__();                                                               \
  }()

static at::Tensor as_rows(const at::Tensor& x) {
  if (x.dim() == 2 && x.scalar_type() == at::kFloat && x.is_contiguous()) return x;
  return x.reshape({-1, x.size(-1)}).to(at::kFloat).contiguous();
}

at::Tensor few_rows(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(x.scalar_type() == w.scalar_type(), "few_rows: x and weight differ in dtype");
  TORCH_CHECK(x.size(-1) == w.size(1), "few_rows: x and weight differ in width");
  const at::Tensor from = as_rows(x);
  const int64_t rows = from.size(0);
  auto shape = x.sizes().vec();
  shape.back() = w.size(0);
  at::Tensor y = at::empty({rows, w.size(0)}, from.options());
  BY_TYPE(w, [&] {
    const Linear<T> layer(w, bias);
    std::vector<float> buffer(rows * layer.K);
    const float* px = arrange<T>(from.const_data_ptr<float>(), rows, layer.K, buffer.data());
    float* py = y.mutable_data_ptr<float>();
    together(w.numel(), [&](const Team& team) {
      product<T>(px, rows, layer, py, false, Linear<T>(), team);
    });
  });
  return y.to(x.scalar_type()).view(shape);
}

// ---------------------------------------------------------------------------- a stack of blocks

template <typename T>
struct Norm {
  const T* w;
  const T* bias;  // RMSNorm has none
  float eps;

  Norm(const at::Tensor& weight, const std::optional<at::Tensor>& b, double eps)
      : w(weight.const_data_ptr<T>()), bias(b ? b->const_data_ptr<T>() : nullptr), eps(eps) {}

  void operator()(const float* from, float* to, int64_t rows, int64_t D) const {
    for (int64_t m = 0; m < rows; m++, from += D, to += D) {
      float mean = 0;
      if (bias) {
        for (int64_t i = 0; i < D; i++) mean += from[i];
        mean /= D;
      }
      for (int64_t i = 0; i < D; i++) to[i] = from[i] - mean;
      const float scale = 1 / std::sqrt(dot(to, to, D) / D + eps);
      for (int64_t i = 0; i < D; i++) to[i] = to[i] * scale * float(w[i]);
      if (bias)
        for (int64_t i = 0; i < D; i++) to[i] += float(bias[i]);
    }
  }
};

at::Tensor norm(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias, double eps) {
  const at::Tensor from = as_rows(x);
  at::Tensor y = at::empty_like(from);
  BY_TYPE(w, [&] {
    Norm<T>(w, bias, eps)(
        from.const_data_ptr<float>(), y.mutable_data_ptr<float>(), from.size(0), from.size(1));
  });
  return y.to(x.scalar_type()).view(x.sizes());
}

// The first 2·half dimensions of a head, half against half; `rope` has cosines, then sines.
static void rotate(float* x, const float* rope, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half], c = rope[i], s = rope[i + half];
    x[i] = a * c - b * s;
    x[i + half] = b * c + a * s;
  }
}

// Where the next entry of a row goes, in the keys and values of its group.
template <typename T>
struct Place {
  T* keys;  // of the first layer and head
  T* values;
  int64_t position, capacity;
  int64_t layer_stride;
};

// Stores the new key and value of each row and attends to all it has: a thread's share of the heads.
template <typename T>
static void attend(
    float* qkv, const std::vector<float>& rope, const std::vector<Place<T>>& places, int64_t layer,
    int64_t H, int64_t K, float* out, const Team& team) {
  const int64_t half = rope.size() / places.size() / 2;
  const float scale = 1 / std::sqrt(float(K));
  std::vector<float> scores;
  const auto [from, to] = team.share(places.size() * H, 1);
  for (int64_t i = from; i < to; i++) {
    const int64_t p = i / H, head = i % H;
    const Place<T>& place = places[p];
    const int64_t base = layer * place.layer_stride + head * place.capacity * K;
    T* k = place.keys + base;
    T* v = place.values + base;
    float* q = qkv + (3 * p * H + head) * K;
    float* new_k = q + H * K;
    float* new_v = new_k + H * K;
    rotate(q, rope.data() + 2 * p * half, half);
    rotate(new_k, rope.data() + 2 * p * half, half);
    for (int64_t j = 0; j < K; j++) {
      k[place.position * K + j] = T(new_k[j]);
      v[place.position * K + j] = T(new_v[j]);
    }
    const int64_t count = place.position + 1;
    scores.resize(count);
    for (int64_t j = 0; j < count; j++) scores[j] = scale * dot(q, k + j * K, K);
    softmax(scores.data(), count);
    float* y = out + (p * H + head) * K;
    std::fill_n(y, K, 0.f);
    for (int64_t j = 0; j < count; j++) add(y, scores[j], v + j * K, K);
  }
}

// One token of every row through GPT-NeoX blocks. `weights` has twelve entries a layer: weight and
// bias of attention_norm, qkv, out, mlp_norm, up and down. `places` has three numbers a row: its
// group, its row in the group's cache, and how many entries that has.
at::Tensor stack(
    const at::Tensor& x, const c10::List<std::optional<at::Tensor>>& weights, double eps,
    bool parallel, const at::Tensor& frequencies, const at::TensorList keys,
    const at::TensorList values, const at::IntArrayRef places) {
  at::Tensor out = as_rows(x);
  if (out.is_alias_of(x)) out = out.clone();
  const int64_t P = out.size(0), D = out.size(1), H = keys[0].size(2), K = keys[0].size(4);
  TORCH_CHECK(3 * P == int64_t(places.size()), "spiralformer: as many places as rows");
  BY_TYPE(weights.get(0).value(), [&] {
    std::vector<Place<T>> where;
    std::vector<float> rope;  // of each row, cosines, then sines
    const float* angle = frequencies.const_data_ptr<float>();
    for (int64_t p = 0; p < P; p++) {
      const int64_t group = places[3 * p], row = places[3 * p + 1], position = places[3 * p + 2];
      const at::Tensor &k = keys[group], &v = values[group];
      TORCH_CHECK(
          k.is_contiguous() && v.is_contiguous() && row < k.size(1) && position < k.size(3),
          "spiralformer: entry ", position, " of row ", row, " is outside its cache");
      const int64_t offset = row * k.stride(1);
      where.push_back(
          {k.mutable_data_ptr<T>() + offset, v.mutable_data_ptr<T>() + offset, position, k.size(3),
           k.stride(0)});
      for (int64_t i = 0; i < frequencies.numel(); i++)
        rope.push_back(std::cos(float(position) * angle[i]));
      for (int64_t i = 0; i < frequencies.numel(); i++)
        rope.push_back(std::sin(float(position) * angle[i]));
    }
    struct Layer {
      Norm<T> attention_norm, mlp_norm;
      Linear<T> qkv, out, up, down;
    };
    std::vector<Layer> layers;
    for (size_t at = 0; at < weights.size(); at += 12) {
      auto w = [&](int i) { return weights.get(at + 2 * i).value(); };
      auto b = [&](int i) { return weights.get(at + 2 * i + 1); };
      layers.push_back(
          {{w(0), b(0), eps}, {w(3), b(3), eps}, {w(1), b(1)}, {w(2), b(2)}, {w(4), b(4)}, {w(5), b(5)}});
    }
    const int64_t wide = layers[0].up.N;
    std::vector<float> buffer(P * (4 * D + wide));
    float* h = out.mutable_data_ptr<float>();
    float* qkv = buffer.data();
    float* found = qkv + 3 * P * D;
    float* up = found + P * D;
    together(layers[0].up.N * D, [&](const Team& team) {
      std::vector<float> normed(P * D), mine(P * std::max(D, wide));
      auto arranged = [&](const float* from, int64_t width) {
        return arrange<T>(from, P, width, mine.data());
      };
      for (size_t i = 0; i < layers.size(); i++) {
        const Layer& layer = layers[i];
        const Linear<T> after = i + 1 < layers.size() ? layers[i + 1].qkv : Linear<T>();
        auto mlp_up = [&](const Linear<T>& next) {
          layer.mlp_norm(h, normed.data(), P, D);
          product<T>(arranged(normed.data(), D), P, layer.up, up, false, next, team);
          const auto [from, to] = team.share(wide);
          for (int64_t p = 0; p < P; p++) gelu(up + p * wide + from, to - from);
        };
        layer.attention_norm(h, normed.data(), P, D);
        const Linear<T>& second = parallel ? layer.up : layer.out;
        product<T>(arranged(normed.data(), D), P, layer.qkv, qkv, false, second, team);
        if (parallel) mlp_up(layer.out);
        team.wait();
        attend<T>(qkv, rope, where, i, H, K, found, team);
        team.wait();
        const Linear<T>& third = parallel ? layer.down : layer.up;
        product<T>(arranged(found, D), P, layer.out, h, true, third, team);
        if (!parallel) {
          team.wait();
          mlp_up(layer.down);
          team.wait();
        }
        product<T>(arranged(up, wide), P, layer.down, h, true, after, team);
        team.wait();
      }
    });
  });
  return out.to(x.scalar_type()).view(x.sizes());
}

// ---------------------------------------------------------------------------- the small operators

template <typename T>
static std::vector<const T*> pointers(
    const at::TensorList given, const at::Tensor& last, std::vector<at::Tensor>& held) {
  std::vector<const T*> found;
  for (const at::Tensor& t : given) held.push_back(t.contiguous());
  held.push_back(last.contiguous());
  for (size_t i = held.size() - given.size() - 1; i < held.size(); i++)
    found.push_back(held[i].const_data_ptr<T>());
  return found;
}

// MeSH: where the update u goes (write), and the next state, a sum over x and all updates.
std::tuple<at::Tensor, at::Tensor> mesh(
    const at::Tensor& h, const at::Tensor& u, const at::Tensor& x, const at::TensorList updates,
    const at::TensorList writes, const at::Tensor& router, const at::Tensor& bias) {
  const int64_t D = h.size(-1), P = h.numel() / D, M = router.size(0) / 2;
  auto shape = h.sizes().vec();
  shape.back() = M;
  at::Tensor write = at::empty(shape, h.options()), state = at::empty(h.sizes(), h.options());
  const at::Tensor from = h.contiguous(), first = x.contiguous();
  BY_TYPE(router, [&] {
    std::vector<at::Tensor> held;
    const auto values = pointers<T>(updates, u, held), shares = pointers<T>(writes, write, held);
    std::vector<float> logits(2 * M), share(M), y(D);
    const T* w = router.const_data_ptr<T>();
    const T* b = bias.const_data_ptr<T>();
    for (int64_t p = 0; p < P; p++) {
      for (int64_t i = 0; i < 2 * M; i++)
        logits[i] = dot(from.const_data_ptr<T>() + p * D, w + i * D, D) + float(b[i]);
      softmax(logits.data(), M);
      softmax(logits.data() + M, M);
      const float* read = logits.data() + M;
      std::copy_n(logits.data(), M, write.mutable_data_ptr<T>() + p * M);
      std::fill(y.begin(), y.end(), 0.f);
      add(y.data(), read[0], first.const_data_ptr<T>() + p * D, D);
      for (size_t k = 0; k < values.size(); k++)
        add(y.data(), dot(shares[k] + p * M, read, M), values[k] + p * D, D);
      std::copy_n(y.data(), D, state.mutable_data_ptr<T>() + p * D);
    }
  });
  return {state, write};
}

// One iteration's update of a decoded token, and MeSH after it: the update of row p is latent `at[p]`
// times its allocation to place `phase[p]` of its chunk, or zero if `at[p]` is negative.
std::tuple<at::Tensor, at::Tensor, at::Tensor> fold(
    const at::Tensor& latents, const at::Tensor& allocations, const at::IntArrayRef at,
    const at::IntArrayRef phase, const at::Tensor& h, const at::Tensor& x,
    const at::TensorList updates, const at::TensorList writes, const at::Tensor& router,
    const at::Tensor& bias) {
  const int64_t D = h.size(-1), W = latents.size(1), G = allocations.size(2);
  const at::Tensor from = latents.contiguous(), shares = allocations.contiguous();
  at::Tensor u = at::empty(h.sizes(), h.options());
  BY_TYPE(router, [&] {
    for (int64_t p = 0; p < int64_t(at.size()); p++) {
      TORCH_CHECK(at[p] < W && phase[p] < G, "spiralformer: no latent ", at[p], " of ", W);
      T* to = u.mutable_data_ptr<T>() + p * D;
      std::fill_n(to, D, T(0.f));
      if (at[p] < 0) continue;
      const T* latent = from.const_data_ptr<T>() + (p * W + at[p]) * D;
      const float share = shares.const_data_ptr<T>()[(p * W + at[p]) * G + phase[p]];
      for (int64_t i = 0; i < D; i++) to[i] = T(float(latent[i]) * share);
    }
  });
  auto [state, write] = mesh(h, u, x, updates, writes, router, bias);
  return {u, state, write};
}

// One step of the online softmax of self-aggregation: h (P, 1, D) joins each row's unfinished
// chunk. The chunks of the rows `ended` are complete: returns their latents and starts anew.
at::Tensor join(
    const at::Tensor& h, const at::Tensor& scorer, at::Tensor total, at::Tensor peak,
    at::Tensor weight, const at::IntArrayRef ended, double floor) {
  const int64_t D = h.size(-1), P = h.numel() / D;
  const at::Tensor from = h.contiguous();
  TORCH_CHECK(total.is_contiguous(), "spiralformer: a state must be contiguous");
  at::Tensor latents = at::empty({int64_t(ended.size()), 1, D}, h.options());
  float* sums = total.mutable_data_ptr<float>();
  float* peaks = peak.mutable_data_ptr<float>();
  float* weights = weight.mutable_data_ptr<float>();
  BY_TYPE(scorer, [&] {
    for (int64_t p = 0; p < P; p++) {
      const T* x = from.const_data_ptr<T>() + p * D;
      const float score = dot(x, scorer.const_data_ptr<T>(), D), next = std::max(peaks[p], score);
      const float fade = std::exp(peaks[p] - next), share = std::exp(score - next);
      for (int64_t i = p * D; i < (p + 1) * D; i++) sums[i] *= fade;
      add(sums + p * D, share, x, D);
      weights[p] = weights[p] * fade + share;
      peaks[p] = next;
    }
    T* out = latents.mutable_data_ptr<T>();
    for (int64_t p : ended) {
      for (int64_t i = p * D; i < (p + 1) * D; i++) *out++ = T(sums[i] / weights[p]);
      std::fill_n(sums + p * D, D, 0.f);
      weights[p] = 0;
      peaks[p] = floor;
    }
  });
  return latents;
}

// The newest latents, one for each of `rows`, take the last places of their rings; how each is
// spread over its chunk, λ·β, comes from the router.
void hold(
    const at::Tensor& found, at::Tensor latents, at::Tensor allocations, const at::IntArrayRef rows,
    const at::Tensor& router, const at::Tensor& bias, double gain) {
  const int64_t D = found.size(-1), W = latents.size(1), G = router.size(0);
  TORCH_CHECK(
      latents.is_contiguous() && allocations.is_contiguous(),
      "spiralformer: a state must be contiguous");
  const at::Tensor from = found.contiguous();
  BY_TYPE(router, [&] {
    const T* latent = from.const_data_ptr<T>();
    const T* w = router.const_data_ptr<T>();
    const T* b = bias.const_data_ptr<T>();
    std::vector<float> share(G);
    for (int64_t row : rows) {
      T* ring = latents.mutable_data_ptr<T>() + row * W * D;
      T* spread = allocations.mutable_data_ptr<T>() + row * W * G;
      std::copy(ring + D, ring + W * D, ring);
      std::copy(spread + G, spread + W * G, spread);
      std::copy_n(latent, D, ring + (W - 1) * D);
      for (int64_t g = 0; g < G; g++) share[g] = dot(latent, w + g * D, D) + float(b[g]);
      softmax(share.data(), G);
      for (int64_t g = 0; g < G; g++) spread[(W - 1) * G + g] = T(share[g] * float(gain));
      latent += D;
    }
  });
}

TORCH_LIBRARY(spiralformer, m) {
  m.def("few_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor");
  m.def(
      "stack(Tensor x, Tensor?[] weights, float eps, bool parallel, Tensor frequencies, "
      "Tensor(a!)[] keys, Tensor(b!)[] values, int[] places) -> Tensor");
  m.def(
      "mesh(Tensor h, Tensor u, Tensor x, Tensor[] updates, Tensor[] writes, Tensor router, "
      "Tensor bias) -> (Tensor, Tensor)");
  m.def(
      "fold(Tensor latents, Tensor allocations, int[] at, int[] phase, Tensor h, Tensor x, "
      "Tensor[] updates, Tensor[] writes, Tensor router, Tensor bias) -> (Tensor, Tensor, Tensor)");
  m.def(
      "join(Tensor h, Tensor scorer, Tensor(a!) total, Tensor(b!) peak, Tensor(c!) weight, "
      "int[] ended, float floor) -> Tensor");
  m.def(
      "hold(Tensor found, Tensor(a!) latents, Tensor(b!) allocations, int[] rows, Tensor router, "
      "Tensor bias, float gain) -> ()");
}
TORCH_LIBRARY_IMPL(spiralformer, CPU, m) {
  m.impl("few_rows", few_rows);
  m.impl("norm", norm);
  m.impl("stack", stack);
  m.impl("mesh", mesh);
  m.impl("fold", fold);
  m.impl("join", join);
  m.impl("hold", hold);
}
