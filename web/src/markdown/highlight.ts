// Syntax highlighting; loaded with the first code block.
import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import csharp from "highlight.js/lib/languages/csharp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import go from "highlight.js/lib/languages/go";
import graphql from "highlight.js/lib/languages/graphql";
import ini from "highlight.js/lib/languages/ini";
import java from "highlight.js/lib/languages/java";
import json from "highlight.js/lib/languages/json";
import kotlin from "highlight.js/lib/languages/kotlin";
import lua from "highlight.js/lib/languages/lua";
import makefile from "highlight.js/lib/languages/makefile";
import markdown from "highlight.js/lib/languages/markdown";
import objectivec from "highlight.js/lib/languages/objectivec";
import perl from "highlight.js/lib/languages/perl";
import phpTemplate from "highlight.js/lib/languages/php-template";
import php from "highlight.js/lib/languages/php";
import plaintext from "highlight.js/lib/languages/plaintext";
import pythonRepl from "highlight.js/lib/languages/python-repl";
import python from "highlight.js/lib/languages/python";
import r from "highlight.js/lib/languages/r";
import ruby from "highlight.js/lib/languages/ruby";
import rust from "highlight.js/lib/languages/rust";
import scss from "highlight.js/lib/languages/scss";
import shell from "highlight.js/lib/languages/shell";
import sql from "highlight.js/lib/languages/sql";
import swift from "highlight.js/lib/languages/swift";
import typescript from "highlight.js/lib/languages/typescript";
import vbnet from "highlight.js/lib/languages/vbnet";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { createLowlight } from "lowlight";

const lowlight = createLowlight({
  bash, c, cpp, csharp, css, diff, go, graphql, ini, java, json, kotlin, lua, makefile, markdown, objectivec, perl, php,
  "php-template": phpTemplate, plaintext, python, "python-repl": pythonRepl, r, ruby, rust, scss, shell, sql, swift, typescript,
  vbnet, xml, yaml,
});
// The grammars of TypeScript and C++ contain those of JavaScript and Arduino, and SCSS is close to Less: a tenth of this
// module is saved.
lowlight.registerAlias({ typescript: ["javascript", "js", "jsx", "mjs", "cjs"], cpp: ["arduino", "ino"], scss: ["less"] });

export function highlight(language: string, text: string) {
  return lowlight.registered(language) ? lowlight.highlight(language, text) : null;
}
