// The TeX library and its font, loaded with the first formula.
import "./formula.css";

export { default as temml } from "temml";
