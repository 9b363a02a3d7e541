"""What requests and replies look like, declared once: decoders, checks and FastAPI's document all come from these types.

A request is checked in two steps. `read` checks what holds for every checkpoint: JSON, types, required fields, sizes. `app.features` then
checks what one checkpoint knows: its actions, its surfaces, its kind of ids, and the bounds of every value.
"""

from app.schema.document import EXAMPLES, PROBLEMS, WORDS, body_of, components, problems_of, reply_of, with_examples
from app.schema.fields import WeightSet, is_handle, is_request_id
from app.schema.reading import check_cost, decode, read, split_batch
from app.schema.replies import (
    BatchReply,
    ContextReply,
    ExplainReply,
    RankReply,
    RecommendReply,
    RetrieveReply,
)
from app.schema.requests import (
    DEFAULT_K,
    NO_USER,
    TWO_USERS,
    BatchRequest,
    Candidate,
    CandidateColumns,
    ContextRequest,
    ExplainRequest,
    HistoryColumns,
    HistoryItem,
    Items,
    PostsChange,
    PostUpsert,
    RankRequest,
    RecommendRequest,
    RetrieveRequest,
    UserRequest,
    count_of,
)
from app.schema.tensors import InferParameters, InferReply, InferRequest, InputTensor, WantedOutput

__all__ = [
    "DEFAULT_K", "EXAMPLES", "NO_USER", "PROBLEMS", "TWO_USERS", "WORDS", "BatchReply", "BatchRequest", "Candidate",
    "CandidateColumns", "ContextReply", "ContextRequest", "ExplainReply", "ExplainRequest", "HistoryColumns", "HistoryItem",
    "InferParameters", "InferReply", "InferRequest", "InputTensor", "Items", "PostUpsert", "PostsChange", "RankReply",
    "RankRequest", "RecommendReply", "RecommendRequest", "RetrieveReply", "RetrieveRequest", "UserRequest", "WantedOutput",
    "WeightSet", "body_of", "check_cost", "components", "count_of", "decode", "is_handle", "is_request_id", "problems_of", "read",
    "reply_of", "split_batch", "with_examples",
]  # fmt: skip
