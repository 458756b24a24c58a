import { parseSync } from "vite";
import { expect, test } from "vitest";
import { LOADERS } from ".";
import { type Language, LANGUAGES } from "./language";

const SOURCES = import.meta.glob<string>(["../**/*.{ts,tsx}", "!../**/*.test.*", "!../text/**"], { query: "?raw", import: "default", eager: true });
const LETTER = /\p{L}/u;
/** A capital letter, and at least two words. */
const SENTENCE = /^\p{Lu}\p{Ll}+[,:]? \p{L}+/u;
const LABEL_PROPERTIES = new Set(["aria-label", "aria-valuetext", "title", "placeholder", "alt", "label", "more"]);
/** Not labels: the name of the project, of a character, a URL, JSON, code, the server's own message, a prompt. */
const ALLOWED = /^(llamado|U\+|http:\/\/127.*|[[{].*|def area.*|print.*|Loading model|The longest rivers.*|MB?)$/;

interface Node {
  type: string;
  [field: string]: unknown;
}

const isNode = (value: unknown): value is Node => typeof (value as Node | null)?.type === "string";

function children(node: Node): Node[] {
  return Object.values(node).flat().filter(isNode);
}

/** Return the literal text of a string or template. */
function literal(node: Node): string {
  if (node.type === "JSXText" || node.type === "Literal") return typeof node.value === "string" ? node.value.trim() : "";
  if (node.type !== "TemplateLiteral") return "";
  return (node.quasis as { value: { cooked: string } }[]).map((one) => one.value.cooked).join("").trim();
}

/** Return the nodes whose values a JSX expression or property shows as they are. */
function shown(node: Node): Node[] {
  if (node.type === "JSXExpressionContainer") return shown(node.expression as Node);
  if (node.type === "ConditionalExpression") return [...shown(node.consequent as Node), ...shown(node.alternate as Node)];
  if (node.type === "LogicalExpression") return [...shown(node.left as Node), ...shown(node.right as Node)];
  return [node];
}

/** Return the literals below a node that users would read. */
function labelsIn(node: Node): string[] {
  let found: Node[] = [];
  if (node.type === "JSXText" || node.type === "Literal" || node.type === "TemplateLiteral") {
    found = node.type === "JSXText" || SENTENCE.test(literal(node)) ? [node] : [];
  } else if (node.type === "JSXElement" || node.type === "JSXFragment") {
    found = (node.children as Node[]).filter((one) => one.type === "JSXExpressionContainer").flatMap(shown);
  } else if (node.type === "JSXAttribute") {
    const isLabel = LABEL_PROPERTIES.has((node.name as unknown as { name: string }).name);
    found = isLabel && isNode(node.value) ? shown(node.value) : [];
  }
  const own = found.map(literal).filter((text) => LETTER.test(text) && !ALLOWED.test(text));
  return [...own, ...children(node).flatMap(labelsIn)];
}

test.each(Object.entries(SOURCES))("%s has no labels of its own", (name, source) => {
  const { program } = parseSync(name, source);
  expect([...new Set(labelsIn(program as unknown as Node))]).toEqual([]);
});

/** Return the paths of all labels, with the kind of each. */
function paths(value: unknown, path = ""): string[] {
  if (typeof value !== "object" || value === null) return [`${path} ${typeof value}`];
  return Object.entries(value).flatMap(([name, part]) => paths(part, `${path}.${name}`));
}

test.each(Object.keys(LANGUAGES))("the catalogue of %s is complete", async (name) => {
  // Types do not cover labels that the server's words select.
  expect(paths(await LOADERS[name as Language]())).toEqual(paths(await LOADERS.en()));
});
