import { expect, test } from "vitest";
import { childrenByParent, type Message, newestLeaf, path, subtree, versions } from "./tree";

function tree(...rows: [id: string, parent: string | null][]): Map<string, Message> {
  return new Map(
    rows.map(([id, parent], created) => [
      id,
      { id, parent, created, conversation: "c", role: "user", content: id } satisfies Message,
    ]),
  );
}

const TREE = tree(["q", null], ["a1", "q"], ["q2", "a1"], ["a2", "q"], ["r", "q2"], ["other", null]);
const CHILDREN = childrenByParent(TREE);

test("path returns the messages down to a leaf", () => {
  expect(path(TREE, "r").map((one) => one.id)).toEqual(["q", "a1", "q2", "r"]);
  expect(path(TREE, null)).toEqual([]);
});

test("versions have the same parent, also at the root", () => {
  expect(versions(CHILDREN, TREE.get("a2")!).map((one) => one.id)).toEqual(["a1", "a2"]);
  expect(versions(CHILDREN, TREE.get("q")!).map((one) => one.id)).toEqual(["q", "other"]);
});

test("newestLeaf follows the newest version at each step", () => {
  expect(newestLeaf(CHILDREN, "a1")).toBe("r");
  expect(newestLeaf(CHILDREN, "q")).toBe("a2");
});

test("subtree contains everything below a message", () => {
  expect(subtree(CHILDREN, "a1").sort()).toEqual(["a1", "q2", "r"]);
});
