// Runs forwards from a file and writes their scores to another, for processors that are emulated: tests/builds/test_emulated.py
// lays out memory as an image, whose pointers are offsets until they are moved to where the image lies here.
#include <cstdio>

#include "kernel.cpp"

struct Forward {
    const ranker::ContextJob* contexts;
    const ranker::CandidateJob* jobs;
    const ranker::Id *post_ids, *author_ids;
    const std::int64_t *surfaces, *ages, *codes;
    float *logits, *probabilities, *continuous;
    std::int64_t n_contexts, n_jobs, rows;
};

struct Run {
    const ranker::Model* model;
    const Forward* forwards;
    std::int64_t n_forwards, use_bf16;
};

static std::vector<char> read_file(const char* path) {
    std::vector<char> content;
    std::FILE* file = std::fopen(path, "rb");
    if (file == nullptr) return content;
    std::fseek(file, 0, SEEK_END);
    content.resize(std::ftell(file));
    std::rewind(file);
    if (std::fread(content.data(), 1, content.size(), file) != content.size()) content.clear();
    std::fclose(file);
    return content;
}

// The file: where the Run is in the image, how many pointers there are, where each is, the image.
int main(int, char** arguments) {
    std::vector<char> file = read_file(arguments[1]);
    if (file.size() < 16) return 2;
    const auto* words = reinterpret_cast<const std::uint64_t*>(file.data());
    char* image = file.data() + 8 * (2 + words[1]);
    for (std::uint64_t i = 0; i < words[1]; ++i)
        *reinterpret_cast<std::uint64_t*>(image + words[2 + i]) += reinterpret_cast<std::uint64_t>(image);
    const Run& run = *reinterpret_cast<const Run*>(image + words[0]);
    std::int64_t threads = 2;
    void* engine = nullptr;
    if (ranker_create(run.model, run.use_bf16, &threads, &engine) != 0) return 3;
    std::FILE* scores = std::fopen(arguments[2], "wb");
    if (scores == nullptr) return 4;
    for (const Forward* f = run.forwards; f < run.forwards + run.n_forwards; ++f) {
        if (ranker_forward(engine, f->contexts, f->n_contexts, f->jobs, f->n_jobs, f->post_ids, f->author_ids, f->surfaces,
                           f->ages, f->codes, f->logits, f->probabilities, f->continuous) != 0)
            return 5;
        std::fwrite(f->logits, sizeof(float), f->rows * run.model->actions, scores);
        std::fwrite(f->probabilities, sizeof(float), f->rows * run.model->actions, scores);
        std::fwrite(f->continuous, sizeof(float), f->rows * run.model->continuous, scores);
    }
    std::fclose(scores);
    ranker_destroy(engine);
    std::puts(ranker_vectors());
}
