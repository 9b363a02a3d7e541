// The shapes that the page's modules share: types alone, not served.

type Names = import("./assets/names.js").Names;
type Weights = Record<string, number>;

interface Post {
  post_id: string;
  author_id: string;
  created_at?: number;
  product_surface?: number;
  codes?: number[];
}

interface Event_ extends Post {
  actions: Weights;
  dwell_time?: number;
}

/** A request as the page keeps it; other fields of the API pass through. */
interface Side {
  user_id: string;
  history: Event_[];
  candidates: Post[];
  weights?: Weights;
  impression_ts?: number;
  k?: number;
}

/** What a link holds. */
interface State {
  source: "rank" | "recommend";
  sides: Side[];
  side: number;
  open: string | null;
  onePer: boolean;
  story: string;
  start?: number;
}

interface Reply {
  candidates: any[];
  actions: string[];
  weights: Weights;
  sent: any;
  timings_ms: Weights;
  model: { name: string; version: string };
  models: { ranker: { name: string; version: string } };
}

/** A post of a list, with its place there. */
interface Shown extends Post {
  key: string;
  own: string;
  place: number;
  slot: number;
  rank: number;
  score: number;
  probabilities: number[];
  continuous?: Weights;
  retrieval_rank?: number;
}

/** What was got of a question; `of` and `changes` by a post's `own`, `refused`: which groups were not. */
interface Explained {
  asked: string;
  of: Map<string, any>;
  places: number[];
  history: Event_[];
  groups: { key: string; name: string; places: number[]; changes: Map<string, number> }[];
  looked: { post: string; heads: number[][][]; user: number[][]; itself: number[][] } | null;
  message?: string;
  refused?: string;
}

/** What a list is drawn with, beside its posts. */
interface View {
  names: Names;
  disliked: string | undefined;
  actions: string[];
  weights: Weights;
  reach: { gain: number; loss: number };
  before: Map<string, Shown> | undefined;
  impression: number | undefined;
  open: string | null;
  explained: Explained | undefined;
  next: Shown | undefined;
  attention: boolean;
  askAttention: (on: boolean) => void;
  count: number;
  slot: number;
}

interface Hint {
  kind: "event" | "topic" | "user";
  value: string;
  text: string;
  act: () => void;
}

interface Story {
  title: (app: App) => string;
  text: (app: App, request: Side) => string;
  done: string;
  make: (app: App, example: Side) => Side | null;
  hint: (app: App, request: Side) => Hint | null;
}

type Change = (key: string, label: string, mutate: (request: Side) => unknown, how?: { redraw?: boolean }) => void;

/** The app of app.js, as the other modules use it. */
interface App {
  state: State;
  names: Names;
  info: any;
  carried: { example: any; names: any };
  start: Side;
  replies: Reply[];
  held: Reply | null;
  explained: Explained[];
  before: Map<string, Shown>[];
  edits: string[];
  told: string[];
  chosen: { author?: string; action?: string };
  gesture: { key: string; at: number };
  past: import("./assets/past.js").Past;
  sweep: string;
  attention: boolean;
  readonly request: Side;
  readonly actions: string[];
  readonly negative: string[];
  readonly canRetrieve: boolean;
  change: Change;
  [method: string]: any;
}
