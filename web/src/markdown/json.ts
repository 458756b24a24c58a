// Answers in JSON, as a schema demands them.

/** Return true if a text is a JSON object or array, or begins as one while it is incomplete. */
export function isJson(text: string, isComplete: boolean): boolean {
  if (!/^\s*(\{\s*"|\{\s*\}|\[\s*[{["\d])/.test(text)) return false;
  if (!isComplete) return true;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
