"""What replies hold, for the document alone: `app.replies` and the endpoints write them."""

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
    score: Annotated[float, about("Σ weight × probability over the weights in force.")]
    rank: Annotated[int, about("Among all candidates; 1 is best, and equal scores keep the order of the request.")]
    probabilities: Annotated[Numbers, about("One for each of the reply's `actions`.")]


class RankedCandidate(Scored):
    """One candidate's scores. They depend on the user, the history and this candidate, on nothing else."""

    continuous: Annotated[dict[str, float], about("Predicted quantities by name, such as `dwell_time` in seconds.")]


class RankedColumns(Strict):
    """All candidates' scores in arrays, one entry a candidate; the fields mean what they mean in `RankedCandidate`."""

    post_id: Annotated[list[Id], about("As they were sent.")]
    score: Annotated[Numbers, about("Σ weight × probability over the weights in force.")]
    rank: Annotated[list[int], about("1 is best.")]
    probabilities: Annotated[Rows, about("A row a candidate; a row has one for each of the reply's `actions`.")]
    continuous: Annotated[dict[str, Numbers], about("Predicted quantities by name.")]


class Timings(Strict):
    """Where the time went, in milliseconds."""

    parse: Annotated[float, about("Reading JSON, checks, features.")]
    queue: Annotated[float, about("Waiting for the engine.")]
    forward: Annotated[float, about("The model.")]


class Reply(Strict, kw_only=True):
    """The fields beside the scores."""

    history_used: Annotated[int, about("History items that the model saw: the ranking model, where there are two.")]
    history_dropped: Annotated[int, about("Older items that did not fit the model's window.")]
    context: Annotated[
        str | UnsetType,
        about("The handle of the ranking model's context, for later requests; only as long as its cache keeps it."),
    ] = UNSET
    request_id: Annotated[str | UnsetType, about("The request's own, if it had one.")] = UNSET


class ContextReply(Reply, kw_only=True):
    """A context that the cache has now. Without `context` it keeps none of this size: send requests whole then."""

    model: Annotated[ModelVersion, about("What computed it.")]
    timings_ms: Annotated[Timings, about("Where the time went.")]


class ScoresReply(Reply, kw_only=True):
    """The fields beside the scores of one model."""

    model: Annotated[ModelVersion, about("What computed it.")]
    actions: Annotated[list[str], about("Names of the probability columns.")]


class RankReply(ScoresReply, kw_only=True):
    """The ranking."""

    candidates: Annotated[
        list[RankedCandidate] | RankedColumns,
        about("In the order of the request, or best first with `top_k`; in the form that the request's `reply` names."),
    ]
    timings_ms: Annotated[Timings, about("Where the time went.")]
    warnings: Annotated[
        list[str] | UnsetType, about("What is likely a mistake of set-up, such as weights that are all 0.")
    ] = UNSET


class FieldError(Strict):
    """What is wrong with a request."""

    field: Annotated[str, about("Where, such as `candidates[3].post_id`; empty for the whole body.")]
    message: Annotated[str, about("What is wrong; never the value itself.")]


class Problem(Strict):
    """Why there are no scores (RFC 9457)."""

    type: Annotated[str, about("A URI that names the kind of problem.")]
    title: Annotated[str, about("The kind of problem, for people.")]
    status: Annotated[int, about("The HTTP status.")]
    code: Annotated[str, about("The kind of problem, for programs: stable.")]
    detail: Annotated[str, about("What went wrong this time.")]
    error: Annotated[str | UnsetType, about("The same as `detail`, under `/v2` alone.")] = UNSET
    errors: Annotated[list[FieldError] | UnsetType, about("The first thing that is wrong with the request.")] = UNSET
    request_id: Annotated[str | UnsetType, about("The value of X-Request-ID.")] = UNSET


class Failed(Strict):
    """A request of a batch that got no scores."""

    error: Annotated[Problem, about("Why there are no scores.")]


class BatchReply(Strict):
    """One entry a request, in order."""

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
    """The history items that were left out one by one, oldest first; one entry an item."""

    place: Annotated[list[int], about("Their places in the request's history, from 0.")]
    post_id: Annotated[list[str], about("Their post ids as strings.")]


class Difference(Strict):
    """What one thing changes: the numbers with it less those without it."""

    score: Annotated[float, about("Of the combined score.")]
    probabilities: Annotated[Numbers, about("One for each of the reply's `actions`.")]


class Differences(Strict):
    """What each of several things changes; one entry a thing."""

    score: Annotated[Numbers, about("Of the combined score.")]
    probabilities: Annotated[Rows, about("A row a thing; a row has one for each of the reply's `actions`.")]


class CandidateChanges(Strict):
    """What /rank says of a candidate, less what it says of the request without one thing."""

    events: Annotated[Differences, about("Without one history item, for each of the reply's `events`.")]
    user: Annotated[Difference, about("Without the user: `user_id` 0.")]
    everything: Annotated[Difference, about("With neither user nor history.")]
    not_covered: Annotated[
        Difference, about("`everything` less `user` and all `events`: how far the changes are from adding up.")
    ]


class AttentionShares(Strict):
    """Shares of a candidate's attention. Those on user, history and itself add up to 1 for each head."""

    user: Annotated[Rows, about("On the user: a row a layer, an entry a head.")]
    history: Annotated[Rows, about("On all of the history that the model sees: a row a layer, an entry a head.")]
    itself: Annotated[Rows, about("On the candidate: a row a layer, an entry a head.")]
    events: Annotated[Rows, about("On each of the reply's `events`, the mean over heads: a row a layer.")]
    heads: Annotated[
        list[Rows] | UnsetType,
        about("On each of the reply's `events`, by layer and head; only where `explain` names one candidate."),
    ] = UNSET


class ExplainedCandidate(Scored):
    """One candidate: what /rank says of it, what would change it, and what it attends to."""

    change: Annotated[CandidateChanges, about("What each thing changes: positive where it raises the number.")]
    attention: Annotated[AttentionShares, about("What the model looks at, which is no explanation by itself.")]


class ExplainTimings(Timings):
    """Where the time went, in milliseconds. `queue` is that of the request itself, `forward` that of all contexts together."""

    attention: Annotated[float, about("The plain path.")]


class ExplainReply(ScoresReply, kw_only=True):
    """Why candidates have their ranks."""

    events: Annotated[LeftOut, about("What was left out one by one.")]
    candidates: Annotated[list[ExplainedCandidate], about("In the order of the request's `explain`.")]
    timings_ms: Annotated[ExplainTimings, about("Where the time went.")]


class CorpusVersion(Strict):
    """The corpus that was searched."""

    name: Annotated[str, about("Name of the corpus.")]
    version: Annotated[str, about("Version of the corpus.")]
    posts: Annotated[int, about("How many posts a search without filters can return.")]
    changes: Annotated[int, about("How often it was changed since it was written.")]
    sequence: Annotated[
        int, about("The last change in it, counted since it was first built; equal on replicas of one feed.")
    ]


class RetrievedPost(Strict):
    """One post of the corpus. Its score depends on the user, the history and this post, on nothing else."""

    post_id: Annotated[str, about("Its id, in decimal where ids are integers.")]
    author_id: Annotated[str, about("Its author's id likewise.")]
    score: Annotated[float, about("Cosine of the user's and the post's vectors.")]
    rank: Annotated[int, about("1 is best; equal scores go by the order of the corpus.")]
    created_at: Annotated[int, about("Unix seconds; 0 where unknown.")]
    topics: Annotated[list[str], about("The post's topic, if it has one.")]


class RetrieveTimings(Strict):
    """Where the time went, in milliseconds."""

    parse: Annotated[float, about("Reading JSON, checks, features.")]
    queue: Annotated[float, about("Waiting for the scan.")]
    encode: Annotated[float, about("Computing the vectors of the users who share the scan.")]
    search: Annotated[float, about("Scanning the corpus.")]


class RetrieveReply(Reply, kw_only=True):
    """The best posts."""

    model: Annotated[ModelVersion, about("The retrieval checkpoint.")]
    corpus: Annotated[CorpusVersion, about("What was searched.")]
    posts: Annotated[list[RetrievedPost], about("Best first; none where the filters leave none.")]
    visible: Annotated[int, about("Posts that the filters left, but for `min_score`.")]
    timings_ms: Annotated[RetrieveTimings, about("Where the time went.")]


class BothModels(Strict):
    """The checkpoints that answered."""

    retrieval: Annotated[ModelVersion, about("What retrieved the posts.")]
    ranker: Annotated[ModelVersion, about("What scored them.")]


class RecommendedPost(RankedCandidate):
    """One candidate's scores, and how it was retrieved."""

    retrieval_score: Annotated[float, about("Its score in /retrieve.")]
    retrieval_rank: Annotated[int, about("Its rank in /retrieve.")]


class RecommendTimings(RetrieveTimings):
    """Where the time went, in milliseconds. `queue` is that of both stages."""

    forward: Annotated[float, about("The ranking model.")]


class RecommendReply(Reply, kw_only=True):
    """The best posts, ranked: what /rank says of what /retrieve returns."""

    models: Annotated[BothModels, about("What computed it.")]
    corpus: Annotated[CorpusVersion, about("What was searched.")]
    actions: Annotated[list[str], about("Names of the probability columns.")]
    candidates: Annotated[list[RecommendedPost], about("Best first.")]
    visible: Annotated[int, about("Posts that the filters left, but for `min_score`.")]
    timings_ms: Annotated[RecommendTimings, about("Where the time went.")]
    warnings: Annotated[list[str] | UnsetType, about("As in `RankReply`.")] = UNSET
