// Syntax highlighting; loaded with the first code block.
import { common, createLowlight } from "lowlight";

const lowlight = createLowlight(common);

export function highlight(language: string, text: string) {
  return lowlight.registered(language) ? lowlight.highlight(language, text) : null;
}
