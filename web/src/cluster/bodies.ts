// Bodies of /cluster, /cluster/events and /cluster/predict.
export interface Device {
  device: string;
  endpoint: string | null;
  state: "ready" | "idle" | "lost" | "away";
  why: string | null;
  layers: number[];
  head: boolean;
  holds: string | null;
  memory: { weights: number; own_disk: number; kv: number; compute: number; free: number; total: number };
  speed: { decode: number | null; prefill: number | null };
  passes_to: string[];
  link: { round_trip: number | null; bandwidth: number | null; pulse: number | null };
  token_seconds: { compute: number; link: number; waiting: number };
  predicted: { seconds: number | null; bytes: number; runs: number };
}

export interface ClusterEvent {
  at: number;
  kind: string;
  device: string;
  what: string;
}

export interface Cluster {
  model: string;
  devices: Device[];
  tokens_per_second: number | null;
  token_seconds: { total: number; compute: number; link: number; waiting: number } | null;
  predicted_seconds: number | null;
  events: ClusterEvent[];
}

export interface Prediction {
  seconds: number | null;
  devices: {
    device: string;
    memory: { weights: number; kv: number; compute: number; free: number; missing: number };
    seconds: { compute: number | null; link: number };
  }[];
}
