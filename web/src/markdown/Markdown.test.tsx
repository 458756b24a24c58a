import { renderToString } from "preact-render-to-string";
import { describe, expect, test, vi } from "vitest";
import { Markdown } from "./Markdown";
import { parts } from "./Plain";

vi.mock("../shell/theme", () => ({ isDark: () => false })); // there is no document here

/** Remove the icons of the page's own buttons. */
function html(text: string): string {
  return renderToString(<Markdown text={text} />).replaceAll(/<svg [^>]*class="icon".*?<\/svg>/g, "");
}

test("renders blocks and inline markup", () => {
  const found = html("# Title\n\nSome *soft* **loud** `code` ~~gone~~\n\n1. one\n2. two\n\n> said\n\n| a | b |\n|--:|---|\n| 1 | 2 |");
  for (const part of [
    "<h1 dir=\"auto\">Title</h1>", "<em>soft</em>", "<strong>loud</strong>", "<code>code</code>", "<s>gone</s>",
    "<ol dir=\"ltr\"><li dir=\"auto\">one</li>", "<blockquote dir=\"ltr\">", "text-align:right", "<table dir=\"ltr\">",
  ]) expect(found).toContain(part);
});

test("starts a list at its number", () => {
  expect(html("3. three\n4. four")).toContain('<ol dir="ltr" start="3">');
});

test("lists, quotations and tables have the direction of their first letter", () => {
  expect(html("- אחת\n\n- שתיים")).toContain('<ul dir="rtl"><li dir="auto"><p dir="auto">אחת</p>');
  expect(html("> 1. مرحبا")).toContain('<blockquote dir="rtl"><ol dir="rtl">');
  expect(html("| א |\n|---|\n| b |")).toContain('<table dir="rtl">');
  expect(html("- one\n- אחת")).toContain('<ul dir="ltr">');
});

test("task lists have check boxes", () => {
  const found = html("- [x] bread\n- [ ] milk\n- [link](https://example.org)");
  expect(found).toMatch(/<li dir="auto" class="task"><input type="checkbox" disabled checked aria-label="[^"]+"\/?>bread<\/li>/);
  expect(found).toMatch(/<li dir="auto" class="task"><input type="checkbox" disabled aria-label="[^"]+"\/?>milk<\/li>/);
  expect(found).toContain('<li dir="auto"><a href=');
});

test("<br> is a line break", () => {
  expect(html("| a |\n|---|\n| one<br>two<br/>three |")).toContain("one<br/>two<br/>three");
  expect(html("`<br>`")).toContain("&lt;br>");
});

test("footnotes are references and notes", () => {
  const found = html("Water[^1] boils[^no].\n\n[^1]: It is *wet*,\nvery.\n[^b]: unused");
  expect(found).toMatch(/Water<sup><button [^>]*aria-label="Footnote 1"[^>]*>1<\/button><\/sup> boils\[\^no\]\./);
  expect(found).toMatch(/<div [^>]*data-note="1"[^>]*><sup>1<\/sup> It is <em>wet<\/em>,<br\/>very\.<\/div>/);
  expect(found).toContain('data-note="b"');
});

test("JSON keeps its indentation", () => {
  const json = '{\n  "name": "Ebro",\n  "parts": [1]\n}';
  expect(html(json)).toContain("<span>json</span>");
  expect(html(json)).toContain("\n  ");
  expect(html("[1] is a source")).not.toContain("class=\"code\"");
  expect(renderToString(<Markdown text={'{\n  "na'} isComplete={false} />)).toContain('class="code"');
});

test("shows the code of a diagram until it is drawn", () => {
  expect(html("```mermaid\ngraph TD; a-->b\n```")).toMatch(/aria-pressed="true"[^>]*> Diagram<.*a--/s);
  expect(renderToString(<Markdown text={"```mermaid\ngraph TD; a"} isComplete={false} />)).not.toContain("aria-pressed");
});

describe("hostile output", () => {
  test.each([
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<iframe srcdoc='<script>'>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](data:text/html,<script>)",
    "[x](vbscript:x)",
    "![x](https://evil.example/leak.png)",
    "[x][y]\n\n[y]: javascript:alert(1)",
    "<https://evil.example/\"onmouseover=alert(1)>",
    "```html\n<script>alert(1)</script>\n```",
    "| <b onclick=x> |\n|---|\n| <script> |",
  ])("%s", (text) => {
    const found = html(text);
    expect(found).not.toMatch(/<(script|img|svg|iframe|b)[\s>]/i);
    expect(found).not.toMatch(/href="(?!https?:|mailto:)/i);
    expect(found).not.toMatch(/<[^>]*\son\w+=/i);
  });
});

test("opens links in a new tab without a referrer", () => {
  expect(html("[x](https://example.org/a)")).toContain(
    '<a href="https://example.org/a" target="_blank" rel="noopener noreferrer nofollow">x</a>',
  );
});

test("renders formulas, but not amounts of money", () => {
  expect(html("It is $x^2$.")).toContain('class="formula"><span>x^2</span>');
  expect(html("It is \\(x\\) and\n\n\\[\ny\n\\]\n\nthen")).toContain('class="formula display"');
  expect(html("$5 and $6")).not.toContain("formula");
  expect(html("`$x$`")).not.toContain("formula");
});

test("names characters that change the reading order", () => {
  const found = html("user \u202Etxt.exe");
  expect(found).not.toContain("\u202E");
  expect(found).toContain("U+202E");
});

test("shows a line of a megabyte as plain text", () => {
  expect(html("x".repeat(1_000_000))).toContain('<pre class="plain">');
  expect(parts("x".repeat(9_000)).map((part) => part.length)).toEqual([4000, 4000, 1000]);
  const lines = "line\n".repeat(3000);
  expect(`${parts(lines).join("\n")}`).toBe(lines);
  expect(parts("😀".repeat(3000)).every((part) => encodeURIComponent(part).length > 0)).toBe(true);
});

test("shows oversized paragraphs and tables as plain text, and their neighbors as Markdown", () => {
  const found = html(`# Title\n\n${"*a **b ".repeat(2000)}\n\n**loud**`);
  expect(found).toContain("<strong>loud</strong>");
  expect(found).not.toContain("<em>");
  expect(html(`**b** ${"x ".repeat(6000)}`)).not.toContain("<strong>");
  const table = `|a|\n|-|\n${"|c|\n".repeat(3000)}\n\n**loud**`;
  expect(html(table)).toContain('<pre class="plain">');
  expect(html(table)).toContain("<strong>loud</strong>");
});

test("shows the rest as plain text after the maximum number of elements", () => {
  for (const end of ["\n", "\r"]) {
    const found = html(`# h${end}`.repeat(10_000));
    expect(found.split("<h1").length - 1).toBe(2000);
    expect(found.split("<pre").length - 1).toBe(1);
    expect(found.split("# h").length - 1).toBe(8000);
  }
});

test("shows a large table as plain text anywhere, and a small one as a table", () => {
  const rows = `|a|b|\n|-|:-:|\n${"|c|d|\n".repeat(600)}`;
  for (const before of ["", "> ", "- "]) {
    const found = html(`said\n\n${before}${rows.replaceAll("\n", `\n${before.replace("-", " ")}`)}\n\n**loud**`);
    expect(found).not.toContain("<td");
    expect(found.split("|c|d|").length - 1).toBe(600);
    expect(found).toContain("<strong>loud</strong>");
  }
  expect(html(rows.slice(0, 600))).toContain("<td");
  expect(html(`said\n${rows}`)).toContain("<p dir=\"auto\">said</p><pre");
});

test("shows a paragraph of hundreds of formulas as plain text, but not one of dozens", () => {
  expect(html("$x$ ".repeat(1000))).toContain('<pre class="plain">');
  expect(html("$x$ ".repeat(100)).split('class="formula"').length - 1).toBe(100);
});

test("rejects formulas with deeply nested braces", () => {
  const deep = (n: number) => `$$${"{".repeat(n)}x${"}".repeat(n)}$$`;
  expect(html(deep(4000))).not.toContain('class="formula');
  expect(html(deep(100))).toContain('class="formula');
});

test("cuts stacked marks, but keeps the marks of a script", () => {
  expect(html(`e${"\u0301".repeat(5000)}`).length).toBeLessThan(100);
  expect(html("ที่นี่ e\u0301\u0323 שָׁלוֹם")).toContain("ที่นี่ e\u0301\u0323 שָׁלוֹם");
});
