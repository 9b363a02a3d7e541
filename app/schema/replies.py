"""What replies hold. Only the OpenAPI document uses these types: `app.replies` and the endpoints write the JSON."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from app.schema.fields import REF, Id, Strict, about

Numbers = list[float]
Rows = list[list[float]]


class ModelVersion(Strict):
    """The checkpoint that computed the scores."""

    name: Annotated[str, about("Name of the checkpoint.")]
    version: Annotated[str, about("Version of the checkpoint.")]


class Scored(Strict):
    """The fields of every scored candidate."""

    post_id: Annotated[Id, about("As it was sent.")]
    score: Annotated[float, about("Σ weight × probability, with the request's weights or the checkpoint's own.")]
    rank: Annotated[
        int,
        about(
            "Among all candidates; 1 is best, and equal scores keep the order of the request. With `explore` it is drawn."
        ),
    ]
    probabilities: Annotated[Numbers, about("One for each of the reply's `actions`.")]


PROPENSITY = "Only with `explore`: the probability that this rank went to this candidate, given the ranks above it."


class RankedCandidate(Scored, kw_only=True):
    """One candidate's scores. They depend on the user, the history and this candidate, and on nothing else."""

    propensity: Annotated[float | UnsetType, about(PROPENSITY)] = UNSET
    continuous: Annotated[dict[str, float], about("Predicted quantities by name, such as `dwell_time` in seconds.")]


class RankedColumns(Strict, kw_only=True):
    """The scores of all candidates as arrays, with one entry for each candidate. The fields mean the same as in `RankedCandidate`."""

    post_id: Annotated[list[Id], about("As they were sent.")]
    score: Annotated[Numbers, about("Σ weight × probability, with the request's weights or the checkpoint's own.")]
    rank: Annotated[list[int], about("1 is best.")]
    propensity: Annotated[Numbers | UnsetType, about(PROPENSITY)] = UNSET
    probabilities: Annotated[
        Rows, about("One row for each candidate, with one entry for each of the reply's `actions`.")
    ]
    continuous: Annotated[dict[str, Numbers], about("Predicted quantities by name.")]


class Timings(Strict):
    """Where the time went, in milliseconds."""

    parse: Annotated[float, about("Reading and checking the body, and making the features.")]
    queue: Annotated[float, about("Waiting, from when it was checked until its scores were there, less `forward`.")]
    forward: Annotated[float, about("Running the model.")]


class Reply(Strict, kw_only=True):
    """What every reply has besides the scores."""

    history_used: Annotated[int, about("How many history items the model saw; with two models, the ranking model.")]
    history_dropped: Annotated[int, about("How many older items did not fit the model's window.")]
    context: Annotated[
        str | UnsetType,
        about(
            "The handle of the ranking model's context, for later requests. It works as long as the cache keeps the context."
        ),
    ] = UNSET
    request_id: Annotated[
        str | UnsetType,
        about("The `request_id` of the request, if it had one; in a batch, what the request is called."),
    ] = UNSET


class ContextReply(Reply, kw_only=True):
    """A context that is now in the cache. No `context` means that the cache does not keep contexts of this size: send whole requests."""

    model: Annotated[ModelVersion, about("What computed it.")]
    timings_ms: Annotated[Timings, about("Where the time went.")]


class ScoresReply(Reply, kw_only=True):
    """What a reply of one model has besides the scores."""

    model: Annotated[ModelVersion, about("What computed it.")]
    actions: Annotated[list[str], about("Names of the probability columns.")]


class RankReply(ScoresReply, kw_only=True):
    """The ranking."""

    candidates: Annotated[
        list[RankedCandidate] | RankedColumns,
        about(
            "In the order of the request, or best first with `top_k`. The request's `reply` chooses objects or columns."
        ),
    ]
    timings_ms: Annotated[Timings, about("Where the time went.")]
    warnings: Annotated[list[str] | UnsetType, about("Likely mistakes, such as weights that are all 0.")] = UNSET


class FieldError(Strict):
    """What is wrong with a request."""

    field: Annotated[str, about("Path of the field, such as `candidates[3].post_id`; empty for the whole body.")]
    message: Annotated[str, about("What is wrong; never the value itself.")]


class Problem(Strict):
    """Why there are no scores (RFC 9457)."""

    type: Annotated[str, about("A URI that names the kind of problem.")]
    title: Annotated[str, about("The kind of problem, for people.")]
    status: Annotated[int, about("The HTTP status.")]
    code: Annotated[str, about("The kind of problem, for programs; stable.")]
    detail: Annotated[str, about("What went wrong this time.")]
    error: Annotated[str | UnsetType, about("The same as `detail`; only under `/v2`.")] = UNSET
    errors: Annotated[list[FieldError] | UnsetType, about("The first thing that is wrong with the request.")] = UNSET
    request_id: Annotated[str | UnsetType, about("The value of X-Request-ID.")] = UNSET


class Failed(Strict):
    """A request of a batch that got no scores."""

    error: Annotated[Problem, about("Why there are no scores.")]


class BatchReply(Strict):
    """One entry for each request, in order."""

    results: Annotated[
        list[Any],  # msgspec has no union of two structs without tags
        Meta(
            extra_json_schema={
                "items": {"anyOf": [{"$ref": REF.format(name="RankReply")}, {"$ref": REF.format(name="Failed")}]}
            }
        ),
        about("Scores, or why there are none."),
    ]


class LeftOut(Strict):
    """The history items that were left out, one at a time. One entry for each item, oldest first."""

    place: Annotated[list[int], about("Their indices in the request's history, from 0.")]
    post_id: Annotated[list[str], about("Their post ids as strings.")]


class Difference(Strict):
    """What one input changes: the numbers with it minus the numbers without it."""

    score: Annotated[float, about("Change of the score.")]
    probabilities: Annotated[Numbers, about("Change of each probability, one for each of the reply's `actions`.")]


class Differences(Strict):
    """What each of several inputs changes, with one entry for each input."""

    score: Annotated[Numbers, about("Changes of the score.")]
    probabilities: Annotated[Rows, about("One row for each input, with one change for each of the reply's `actions`.")]


class CandidateChanges(Strict):
    """A candidate's result in /rank minus its result without one input."""

    events: Annotated[Differences, about("Without one history item, for each of the reply's `events`.")]
    user: Annotated[Difference, about("Without the user: `user_id` 0.")]
    everything: Annotated[Difference, about("With neither user nor history.")]
    not_covered: Annotated[
        Difference, about("`everything` minus `user` and all `events`: how far the changes are from adding up.")
    ]


class AttentionShares(Strict):
    """Shares of a candidate's attention. For each head, `user`, `history` and `itself` add up to 1."""

    user: Annotated[Rows, about("On the user: one row for each layer, with one entry for each head.")]
    history: Annotated[
        Rows, about("On all of the history that the model sees: one row for each layer, with one entry for each head.")
    ]
    itself: Annotated[Rows, about("On the candidate itself: one row for each layer, with one entry for each head.")]
    events: Annotated[Rows, about("On each of the reply's `events`, as the mean over heads: one row for each layer.")]
    heads: Annotated[
        list[Rows] | UnsetType,
        about("On each of the reply's `events`, by layer and head; only if `explain` names a single candidate."),
    ] = UNSET


class ExplainedCandidate(Scored):
    """One candidate: its result in /rank, what each input changes, and what the candidate attends to."""

    change: Annotated[CandidateChanges, about("What each input changes: positive if it raises the number.")]
    attention: Annotated[AttentionShares, about("Where the model looked. This is not an explanation by itself.")]


class ExplainTimings(Timings):
    """Where the time went, in milliseconds. `queue` is the wait for this call's turn and of the request itself, `forward` is for all the
    contexts together, with the rests between them."""

    attention: Annotated[float, about("Computing the attention, beside the engine.")]


class ExplainReply(ScoresReply, kw_only=True):
    """Why candidates rank where they do."""

    events: Annotated[LeftOut, about("What was left out, one at a time.")]
    candidates: Annotated[list[ExplainedCandidate], about("In the order of the request's `explain`.")]
    timings_ms: Annotated[ExplainTimings, about("Where the time went.")]
    warnings: Annotated[list[str] | UnsetType, about("As in `RankReply`.")] = UNSET


class CorpusVersion(Strict):
    """The corpus that was searched."""

    name: Annotated[str, about("Name of the corpus.")]
    version: Annotated[str, about("Version of the corpus.")]
    posts: Annotated[int, about("How many posts a search without filters can return.")]
    changes: Annotated[int, about("How many changes it has had since it was written.")]
    sequence: Annotated[
        int,
        about("Number of the last change in it, counted since it was first built. Replicas of one feed count alike."),
    ]


class RetrievedPost(Strict):
    """One post of the corpus. Its score depends on the user, the history and this post, and on nothing else."""

    post_id: Annotated[str, about("Its id, as a decimal string if ids are integers.")]
    author_id: Annotated[str, about("Its author's id, in the same form.")]
    score: Annotated[float, about("Cosine of the user's and the post's vectors.")]
    rank: Annotated[int, about("1 is best; equal scores keep the order of the corpus.")]
    created_at: Annotated[int, about("Unix seconds; 0 if unknown.")]
    topics: Annotated[list[str], about("The post's topic, if it has one.")]
    codes: Annotated[list[int] | UnsetType, about("Its content codes; left out if none of the posts has any.")] = UNSET


class RetrieveTimings(Strict):
    """Where the time went, in milliseconds."""

    parse: Annotated[float, about("Reading and checking the body, and making the features.")]
    queue: Annotated[float, about("Waiting, until its posts were there, less `encode` and `search`.")]
    encode: Annotated[float, about("Computing the vectors of the users who share the scan.")]
    search: Annotated[float, about("Scanning the corpus.")]


class RetrieveReply(Reply, kw_only=True):
    """The best posts."""

    model: Annotated[ModelVersion, about("The retrieval checkpoint.")]
    corpus: Annotated[CorpusVersion, about("What was searched.")]
    posts: Annotated[list[RetrievedPost], about("Best first; empty if the filters leave none.")]
    visible: Annotated[int, about("How many posts passed the filters other than `min_score`.")]
    timings_ms: Annotated[RetrieveTimings, about("Where the time went.")]


class BothModels(Strict):
    """The checkpoints that answered."""

    retrieval: Annotated[ModelVersion, about("What retrieved the posts.")]
    ranker: Annotated[ModelVersion, about("What scored them.")]


class RecommendedPost(RankedCandidate, kw_only=True):
    """One candidate's scores, and how it was retrieved."""

    retrieval_score: Annotated[float, about("Its score in /retrieve.")]
    retrieval_rank: Annotated[int, about("Its rank in /retrieve.")]


class RecommendTimings(RetrieveTimings):
    """Where the time went, in milliseconds. `queue` is the wait of both stages together."""

    forward: Annotated[float, about("Running the ranking model.")]


class RecommendReply(Reply, kw_only=True):
    """The best posts, ranked: the result of /rank for what /retrieve returns."""

    models: Annotated[BothModels, about("What computed it.")]
    corpus: Annotated[CorpusVersion, about("What was searched.")]
    actions: Annotated[list[str], about("Names of the probability columns.")]
    candidates: Annotated[list[RecommendedPost], about("Best first.")]
    visible: Annotated[int, about("How many posts passed the filters other than `min_score`.")]
    timings_ms: Annotated[RecommendTimings, about("Where the time went.")]
    warnings: Annotated[list[str] | UnsetType, about("As in `RankReply`.")] = UNSET
