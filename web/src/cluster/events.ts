// Messages of /cluster/events: the whole view first, then its changes as JSON Patches (RFC 6902).
import type { Replacement, ViewChange, WholeView } from "../api/schema";

/** Return the view after a message; null if a message is missing in between. */
export function afterMessage(before: WholeView | null, message: WholeView | ViewChange): WholeView | null {
  if ("cluster" in message) return message;
  if (!before || message.sequence !== before.sequence + 1) return null;
  const cluster = message.patch.reduce<unknown>(applyReplacement, before.cluster);
  return { sequence: message.sequence, cluster: cluster as WholeView["cluster"] };
}

/** Return a copy of a JSON value with the part at a path (JSON Pointer, RFC 6901) replaced. */
function applyReplacement(value: unknown, { path, value: part }: Replacement): unknown {
  const keys = path.split("/").slice(1).map((key) => key.replaceAll("~1", "/").replaceAll("~0", "~"));
  return replaceAt(value, keys, part);
}

function replaceAt(value: unknown, [key, ...rest]: string[], part: unknown): unknown {
  if (key === undefined) return part;
  if (Array.isArray(value)) return value.map((one: unknown, i) => (i === Number(key) ? replaceAt(one, rest, part) : one));
  const object = value as Record<string, unknown>;
  return { ...object, [key]: replaceAt(object[key], rest, part) };
}
