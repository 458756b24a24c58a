import { render } from "preact";
import "./style/base.css";
import { App } from "./shell/App";

const root = document.getElementById("app");
if (root) render(<App />, root);
