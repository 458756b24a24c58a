// Bodies of /cluster and /lab. Generated from the server's records, which explain them:
// python -m llamado.server.api.cluster.typescript > web/src/api/schema.ts

export interface DeviceMemory {
  weights: number;
  own_disk: number;
  kv: number;
  compute: number;
  free: number;
  total: number;
  free_now: number | null;
}

export interface ReadSpeed {
  decode: number | null;
  prefill: number | null;
}

export interface Link {
  round_trip: number | null;
  bandwidth: number | null;
  pulse: number | null;
}

export interface TokenTime {
  compute: number;
  link: number;
  waiting: number;
}

export interface PredictedToken {
  seconds: number | null;
  bytes: number;
  runs: number;
}

export interface DeviceView {
  device: string;
  endpoint: string | null;
  state: "ready" | "idle" | "lost" | "away";
  why: string | null;
  layers: number[];
  head: boolean;
  holds: string | null;
  memory: DeviceMemory;
  speed: ReadSpeed;
  passes_to: string[];
  link: Link;
  token_seconds: TokenTime;
  predicted: PredictedToken;
  utilization: number | null;
}

export interface ModelTokenTime {
  compute: number;
  link: number;
  waiting: number;
  total: number;
}

export interface ClusterEvent {
  at: number;
  kind: "joined" | "drained" | "lost" | "back" | "moved";
  device: string;
  what: string;
}

export interface ClusterBody {
  model: string;
  devices: DeviceView[];
  tokens_per_second: number | null;
  token_seconds: ModelTokenTime | null;
  predicted_seconds: number | null;
  events: ClusterEvent[];
}

export interface WholeView {
  sequence: number;
  cluster: ClusterBody;
}

export interface Replacement {
  op: "replace";
  path: string;
  value: unknown;
}

export interface ViewChange {
  sequence: number;
  patch: Replacement[];
}

export interface LayoutPart {
  device: string;
  layers: number[];
  head: boolean;
}

export interface PartMemory {
  weights: number;
  kv: number;
  compute: number;
  free: number;
  missing: number;
}

export interface PartTime {
  compute: number | null;
  link: number;
}

export interface PartPrediction {
  device: string;
  memory: PartMemory;
  seconds: PartTime;
}

export interface LayoutPrediction {
  seconds: number | null;
  devices: PartPrediction[];
}

export interface LabLink {
  endpoint: string;
  worker: string;
  latency_ms: number;
  jitter_ms: number;
  bandwidth: number | null;
  own: boolean;
  running: boolean;
  watched: boolean;
}

export interface LabBody {
  on: boolean;
  links: LabLink[];
}
